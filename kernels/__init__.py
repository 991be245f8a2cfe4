"""Triton kernels. They import nothing but triton; `fusedce.backends.triton` runs them.

* ``compact``: finds the valid rows of a batch, on the device.
* ``tile``: a tile of logits, and the pointwise steps on it.
* ``walk``: logits by tiles, and what is made of each: loss, statistics, or exponentials.
* ``softmax_grad``: loss and gradient of a chunk of logits, two bytes each, one factor a row; or of
  a tile of logits, with factors of each row's own.
* ``input_grads``: what products leave out of the gradients of hidden states and head.
* ``divergence``: divergence of a student from a teacher, and the student's gradient.
"""
