"""Give parts of a model their own meshes (`parts`, `pipeline: {meshes: ...}`).

section     `parts`: modules and the mesh of each part; `meshes`: the mesh of each stage of a pipeline
passes      the ops of each part, for shardc.passes.annotate.mesh_parts
"""
