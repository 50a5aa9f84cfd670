"""What is to run first where a GPU is, and what is counted where there is none.

python -m tests.gpu_first --counts    what a training step gives a GPU to do: needs no GPU
python -m tests.gpu_first             tests and times on a GPU, a line of JSON a case: five minutes
"""
