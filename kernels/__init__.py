"""Triton kernels. They import nothing but triton; `fusedce.backends.triton` runs them.

* ``compact``: finds the valid rows of a batch, on the device.
* ``tile``: a tile of logits, and the pointwise steps on it.
* ``walk``: logits by tiles, and what is made of each: loss, statistics, or exponentials.
* ``softmax_grad``: loss and gradient of a chunk of logits, two bytes each, one factor a row.
* ``input_grads``: what products leave out of the gradients of hidden states and head.
* ``stats``: merges the statistics of splits: label, log-sum-exp, entropy, argmax and mean.
* ``token_grad``: gradient of a tile of logits with factors of each row's own.
* ``divergence``: divergence of a student from a teacher, and the student's gradient.
"""
