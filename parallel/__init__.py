"""How the model is split: one file or folder per axis of the mesh, plus the mesh itself and the
collectives.

    axis                     what each rank holds                  what travels
    pp            pipeline/  a range of layers                     activations between neighbours
    dp_replicate  data.py    a replica of the sharded group        gradients, once per step
    dp_shard      data.py    1 / dp_shard of weights, gradients    weights (gather), gradients
                             and moments                           (reduce-scatter)
    tp            tensor.py  1 / tp of each matrix (and of the     activations, several times per
                             sequence)                             block

axes.py names the axes and says how many ranks each has; mesh.py makes the DeviceMesh, and its
views.

parameter.py says what a weight is; layer.py is what every layer with weights is built on;
deferred.py is the queue in which a weight's gradient may wait; partial.py sums over tp what each tp
rank knows only in part; placement.py says who holds what of a tensor; activation.py recomputes;
memory.py names what memory is for.

Imports torch, and nothing else of the house but files of the root; `pipeline/` is handed modules
and never imports the model.
"""
