"""Triton kernels. They import nothing but triton; `fusedce.backends.triton` runs them.

* ``compact``: finds the valid rows of a batch, on the device.
* ``tile``: a tile of logits, and the pointwise steps on it.
* ``walk``: logits tile by tile, and what is made of each tile: loss, statistics, or exponentials.
* ``softmax_grad``: exponentials, losses and row factors of a chunk of logits; or the gradient of a
  tile of logits, whose tokens have upstream factors of their own.
* ``input_grads``: adds the labels' entries, which the GEMMs leave out, to the gradients.
* ``divergence_rows``: divergence of a student from a teacher, and the student's gradient.
"""
