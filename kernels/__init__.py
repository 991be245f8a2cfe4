"""Triton kernels. They import nothing but triton; `fusedce.backends.triton` runs them.

* ``compact``: the valid rows of a batch, on the device.
* ``tile``: a tile of logits, and the pointwise steps on it.
* ``forward``: loss sum, token count and log-sum-exp in one launch, no logits.
* ``exp_gemm``: exponentials of a chunk by one product with an epilogue.
* ``softmax_grad``: loss and gradient of a chunk of logits, two bytes each, one factor a row.
* ``label_grad``: single entries of that gradient, brought to the gradient of the head.
* ``stats``: label, log-sum-exp, entropy, argmax and mean of every row, in one pass.
* ``token_grad``: gradient of a tile of logits with factors of each row's own.
* ``scale``: the upstream gradient, applied in place.
"""
