"""Complete scripts, each a use of the building blocks. A file's docstring says how to run it; the tests run it.

- own_run: a training run from Python, with data and a callback of your own
- classify: documents are told apart by rows of the model's head: a loss of its own, over a column of a token file
- dpo: answers that people chose become likelier than others, by stored log-probabilities of a reference
- distill: a student learns a teacher's stored likeliest tokens
- block: tensor-parallel layers in a model of your own, and any optimizer
- feed_forward: the fused matmuls of tpkernels, without the engine
- operators: the operators between the matmuls: a block and its loss on one device
- images: data parallelism for any module, with the optimizer's state divided over the replicas
- fully_shard: torch's own sharding of weights and gradients, alone and on the stages of a pipeline
- stages: a pipeline out of an nn.Sequential
- gpt: a model of your own on all three axes: tensor, pipeline and data parallel
- transformers_gpt2: GPT-2 as transformers writes it, cut by a table, on the same three axes
- slurm.sh: a batch script, whose job goes on after a preemption or the end of its time
- swap: an operator of your own: an exchange inside a Triton kernel; a module, not a script
"""
