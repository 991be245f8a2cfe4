"""A vocabulary whose rows are split over ranks: between the losses and what computes them.

How a loss travels. ``prepared`` (`door`) is where every public function comes in, with ranks or
without. Without, it checks and flattens. With ranks, `layout` reads from DTensors or groups who
holds which rows and tokens, `agreement` compares in one all-gather what the ranks were given, and
the tokens of all ranks are gathered if each has its own. The way out is `merge`: this rank's rows
are a vocabulary of their own to everything below, whose statistics it merges with the other ranks'.
Below, one field knows of ranks: ``Problem.reduce_over``, the group that adds up ``d_hidden``. (A
divergence merges inside its walk, chunk by chunk.)
"""
