"""A machine that runs what ranks call by NCCL's rules, without a GPU: it finds what hangs there.

program.py      the words of a rank's host: launch, wait for a launch, wait for the device, connect
machine.py      runs the programs of all ranks, to their times or to the report of what does not go on
processors.py   who holds the processors of a rank's GPU
plans.py        a plan of tpengine/plan as programs
recording.py    what a rank of a run calls, over torch's fake backend (support/ranks/fake_ranks.py)
operations.py   a record as programs
orders.py       operations that ranks issue in orders which do not fit together
mutants.py      records broken on purpose

The rules, of which none is kinder than NCCL:

- One in-order stream per rank and communicator. An operation begins when it is the next on its stream and what the
  rank has launched on its compute stream before it has ended. From then on it holds its processors.
- Rendezvous only: it ends when its partners' have begun and the data has moved. Nothing is sent early, into a buffer.
- A wait holds what is launched on the compute stream later. The host goes on.
- A communicator is made in its members' first call, a connection in the first message from one rank to another. Both
  block the host until the others call, and until the own device has nothing left to do, since they allocate.
- Who needs processors gets what is free, and keeps it until he ends. In which order is drawn.
"""
