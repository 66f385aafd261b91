"""Exchanges between ranks: communicators, and the shared memory that they and the fused matmuls read and write.

communicator.py             a group of ranks: exchanges through an arena, or collectives
collectives.py              the collectives of a process group, and the direct exchanges over gloo
arena.py mailbox.py         gather and reduce-scatter, and messages, through memory of one host
calls.py                    what the ranks of an arena agree on in a call
experts.py                  rows of tokens to the owners of their experts, and back
device_arena.py copies.py   the arena whose exchanges kernels make, and its copy engine
stream_waits.py             waits of the copy engine's stream without a kernel
pending.py                  a collective that has started and may not have ended
background.py               exchanges through an arena that go on in a thread
strategies.py               names of the ways to do a matmul with its exchange
tree.py                     sums in a balanced tree, the order of every sum between ranks
"""
