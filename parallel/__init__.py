"""How the model is split over ranks: one file or folder per axis of the mesh, plus the mesh itself
and the collectives.

    axis                     what each rank holds                  what is sent
    pp            pipeline/  a range of layers                     activations between neighbours
    dp_replicate  data.py    a replica of the sharded group        gradients, once per step
    dp_shard      data.py    1 / dp_shard of weights, gradients    weights (gather), gradients
                             and moments                           (reduce-scatter)
    (ep)          expert.py  1 / ep of the experts; a part of      tokens, to their experts and
                             dp_shard × cp × tp                    back, once per layer and pass
    cp            context.py a part of each sequence               keys and values, once per
                                                                   attention layer and pass
    tp            tensor.py  1 / tp of each matrix (and of the     activations, several times per
                             sequence)                             block

    axes.py             the names and sizes of the axes; mesh.py: the DeviceMesh and its views
    parameter.py        the description of a weight; layer.py: the base class of layers with weights
    fsdp_units.py       what FSDP gathers together, and over which view of the mesh
    config.py           the section `parallel.` of a configuration file
    dispatch/           how tokens reach their experts
    collectives.py      the collectives of tensor, context and expert parallelism
    asynchronous.py     collectives that autograd follows, started in one place, awaited in another
    weight_gradient.py  where a weight's gradient goes, when it is formed, and its sum
    whole.py            weights that no other rank shares: data parallelism over one rank
    partial.py          the sum over tp of gradients that are partial on each tp rank
    placement.py        which part of a global tensor a rank holds
    whole_matrices.py   computing with matrices whose parts are spread over ranks
    activation.py       activation checkpointing, and compiled blocks
    kept.py             what activation checkpointing keeps as the result of several operations
    memory.py           the categories of memory use
    disk.py             memory in a file on a local disk

This package imports torch and, of this repository, only the modules in its root folder. `pipeline/`
receives the stages as modules and never imports the model.
"""
