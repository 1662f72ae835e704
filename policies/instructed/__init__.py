"""A policy that is told in words what to do: one set of weights, several tasks, and nothing but the text says which.

What goes in:

``state float32[39]``
    Meta-World's own observation: what is seen now (18 numbers), what was seen a control step ago (18), the goal (3). So
    one array is two observations, and nobody has to keep a history.
``image uint8[64, 64, 3]`` and ``gripper float32[4]``
    for the policy from pixels: the hand's position and the fingers' opening, now.

Actions are ``float32[4]`` in -1..1, at 80 Hz.

Demonstrations it is trained on (``omni_loop.demos``, names ``metaworld`` and ``metaworld-pixels``) are
:class:`omni_loop.training.demos.Demos` with one column more, ``task int64[episodes]``, an index into the names of the
file ``tasks.json`` (a list, such as ``["reach-v3", ...]``) that lies beside the columns of each split. An episode of T
actions has T + 1 rows; ``state float32[n, 39]``, ``action`` and ``label float32[n, 4]``; ``frames uint8[n, 64, 64, 3]``
of all rows for ``metaworld-pixels``, none for ``metaworld``. Kinds are ``expert`` and ``perturbed``.
"""
