"""What programs written for other systems find here: their module paths, and adapters where they
shape a thing otherwise than recapp does. Nothing in the package rests on this room but the
package's own `__init__`, which lets the paths be found.

    torchrec_names    which name of TorchRec is what here, path by path
    hugectr_names     which name of HugeCTR is what here (hugectr_collection, hugectr_optimizers)
    foreign_paths     lets `import` and attribute access find those paths
    the others        adapters: TorchRec's DLRM, train pipeline, environments, plans by hand, ...
"""
