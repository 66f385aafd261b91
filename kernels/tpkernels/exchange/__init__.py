"""What ranks exchange over: communicators, and the shared memory that they and the fused matmuls read and write.

communicator.py             a group of ranks: exchanges through an arena, or collectives
arena.py mailbox.py         gather and reduce-scatter, and messages, through memory of one host
device_arena.py copies.py   that memory as kernels exchange through it; the copy engine
pending.py                  a collective under way
strategies.py               names of the ways to do a matmul and its exchange
tree.py                     sums in a balanced tree, the order of every sum between ranks
"""
