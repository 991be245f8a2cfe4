"""Triton kernels. They import nothing but triton; `fusedce.backends.triton` runs them.

* ``compact``: finds the valid rows of a batch, on the device.
* ``tile``: a tile of logits, and the pointwise steps on it.
* ``forward``: loss sum, token count and log-sum-exp in one launch, no logits.
* ``exp_gemm``: exponentials of a chunk by one product with an epilogue.
* ``softmax_grad``: loss and gradient of a chunk of logits, two bytes each, one factor a row.
* ``input_grads``: what products leave out of the gradients of hidden states and head.
* ``stats``: label, log-sum-exp, entropy, argmax and mean of every row, in one pass.
* ``token_grad``: gradient of a tile of logits with factors of each row's own.
* ``divergence``: divergence of a student from a teacher, and the student's gradient.
"""
