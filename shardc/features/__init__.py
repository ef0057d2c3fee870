"""Optional features, a folder each: to delete one, delete its folder. Core does not import them (shardc.optional).

adapters        low-rank matrices beside frozen weights (LoRA)      generation   tokens after prompts
matrices        optimizers over whole matrices, each with an owner  reshard      from one plan to another, in memory
fp8             products of numbers of 8 bits                       sequence     long sequences, split over ranks
hub             model cards, and uploads to the Hugging Face hub
trackers        a run in W&B, MLflow, TensorBoard, OpenTelemetry
text            rows of tokens, of chats and documents      choices      experts and keys, recorded or replayed
parts           parts of the model that have their own mesh
rows            rows of every length, balanced by seconds

A feature has those of these files that it needs. Tables of core read the names behind them from all features:

section     Sections: the sections of a spec that it adds (`Spec.sections`) or extends, as pydantic fields
            spans_layers: whether a spec has decisions that need all layers
            token_axes: the axes that split each row of inputs; check: of the spec, beyond its grammar
program     STORED: the type of what the feature puts into `Program.features`; faults: of these, in a compiled folder
            added: the program after a pass has added parameters; axes: over which an optimizer communicates
ops         OPS: ops of programs, by name; PRODUCTS, PACKED: which of them are of a kind that core knows
rules       the rules of its ops: an import registers them
passes      PASSES: the stage that each pass of the feature follows, and its own stage; DERIVATIVES; how_rounded
            annotate: adds layouts at the end of that pass; improve_placement: after placement on an axis of tokens
            recompiled_spec: the spec for a batch of other sizes than the running program's
            mesh_parts: the ops of parts that see the ranks as another mesh
proof       wrong: what is wrong in a compiled program, for `Program.prove`; FOLLOWED, SAME_CALL, AS_BYTES, BYTES
runtime     weights_of: weights of a program with the parameters that it adds; exported: these, for other programs
            StandIns: the parameters that optimizers get (shardc.runtime.state.owners); ASSUMED_OPTIMIZER: of costs;
            CAUSES: of its collectives, by tag without a number
            prepare, check_inputs: of what is given beside a batch, and of each rank's part

A method of core that is a feature's alone (`engine.generate`) is a line there: `shardc.optional.needed` finds the
feature's function, or says that the feature is not installed. A forward that is not the model's own is a
shardc.ir.outputs.OtherForward.

section, program, ops and runtime import what core's folders of the same names may import: no compiler on a rank. One
feature does not import another. Each has a page in docs/how-to and tests in tests/features.
"""
