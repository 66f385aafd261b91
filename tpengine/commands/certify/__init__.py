"""`tpengine certify`: does training in one layout give the same bits as training in another?

witness.py records what each rank computes, and evidence.py compares two runs. distance.py measures fast mode against
exact mode instead. command.py is the command, arguments.py what it understands. Only witness.py needs torch, and only
the ranks import it.
"""
