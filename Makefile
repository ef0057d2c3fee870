# make train | documents | generate | adapters | loop | pretrain | lora | distill | dpo | dit | vit | sequences | libraries | families | test | gpu | fuzz | graphs | hostile | ops | faults | mutants | lint | bench | table | support | docs: each sets up what it needs, once per change of pyproject.toml or constraints.txt.
PYTHON ?= python3
# Twice as many as two cores: tests that wait for processes leave time to others.
JOBS ?= 4
BIN := .venv/bin
READY := .venv/.ready
export OMP_NUM_THREADS ?= 1

.PHONY: train documents generate adapters loop pretrain lora distill dpo dit vit sequences libraries families test quick test-all gpu fuzz graphs hostile ops faults mutants lint bench table support docs types clean
.DEFAULT_GOAL := test

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "shardc needs Python >= 3.10: make PYTHON=python3.12"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

train: $(READY)   ## the main job: a GPT over dp=2 x tp=2 on 4 processes, checked against the plain model
	$(BIN)/python examples/check.py

documents: $(READY)   ## documents packed to 8192 tokens over cp=2: every document's loss is the plain model's
	$(BIN)/python examples/check_documents.py

generate: $(READY)   ## a Llama over tp=2, trained and sampled on 2 processes: the texts are those of transformers' generate
	$(BIN)/python examples/check_generate.py

adapters: $(READY)   ## LoRA beside it on 2 processes: peft loads what was saved, with the same loss
	$(BIN)/python examples/check_adapters.py

loop: $(READY)   ## a training loop before and after: docs/recipes/own-loop.md; STEPS=50, as of all that follow
	$(BIN)/python examples/loop_before.py --steps $(or $(STEPS),50)
	$(BIN)/torchrun --nproc-per-node 4 examples/loop_after.py --steps $(or $(STEPS),50)

pretrain: $(READY)   ## a small Llama from text on 4 processes: docs/recipes/pretrain.md
	$(BIN)/python examples/pretrain.py
	$(BIN)/shardc run examples/pretrain.py examples/pretrain.yaml --steps $(or $(STEPS),200) --eval-batches 8 --save runs/pretrain --auto-resume
	cp runs/tokens/tokenizer* runs/pretrain/

lora: $(READY)   ## LoRA of the folder BASE, by default what `make pretrain` writes: docs/recipes/lora.md
	test -n "$(BASE)" -o -d runs/pretrain || $(MAKE) pretrain
	$(BIN)/shardc run examples/lora.py examples/lora.yaml --steps $(or $(STEPS),150) --save runs/lora --overwrite
	$(BIN)/shardc export examples/lora.py runs/lora runs/merged --spec examples/lora.yaml --merge --overwrite

EXAMPLE = $(BIN)/shardc run examples/$@.py examples/$@.yaml --steps $(or $(STEPS),200)

distill: $(READY)   ## a small model learns from a large one: docs/recipes/distill.md
	$(EXAMPLE)

dpo: $(READY)   ## a model learns which of two answers is better: docs/recipes/distill.md
	$(EXAMPLE)

dit: $(READY)   ## a diffusion transformer: docs/recipes/vision.md
	$(EXAMPLE)

vit: $(READY)   ## timm's ViT if timm is installed, else transformers'
	$(BIN)/shardc run examples/vit.py$$($(BIN)/python -c 'import timm' 2>/dev/null || echo :OfTransformers) examples/vit.yaml --steps $(or $(STEPS),200)

sequences: $(READY)   ## docs/measured/sequences.md: families x methods x ranks of `sequence:`, alone and with other sections
	$(BIN)/python -m tests.bench.sequence_families

# The libraries in an environment of their own, on top of .venv: torch, transformers and what tests run with stay as they are.
.venv-lib/.ready: $(READY)
	@test -x .venv-lib/bin/python || $(PYTHON) -m venv .venv-lib
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$(.venv-lib/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	.venv-lib/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[libraries]'
	.venv-lib/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps litgpt
	@touch $@

libraries: .venv-lib/.ready   ## docs/measured/libraries.md: models of other libraries in five settings, for MINUTES; goes on where it stopped; ONLY='timm *'
	.venv-lib/bin/python -m tests.bench.libraries --minutes $(or $(MINUTES),60) --only '$(or $(ONLY),*)'

families: $(READY)   ## docs/measured/families.md: every model class of transformers, for MINUTES; goes on where it stopped; ONLY='*ForCausalLM'
	$(BIN)/python -m tests.bench.families --minutes $(or $(MINUTES),60) --only '$(or $(ONLY),*)'

test: $(READY)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

quick: $(READY)   ## one short test of each file, of every folder: a look after each change
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --quick

test-all: $(READY)   ## every case of every test: of those with many long ones, `make test` takes a share (tests/shares.py)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --all-cases --all-families --write-seconds

# The machine's own Python, whose torch is built for its GPU, or that of .venv; wheels in .whl/ where no registry is reached.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(CURDIR)/$(BIN)/python,$(PYTHON))

gpu: export PYTHONPATH := $(CURDIR)/build/gpu:$(CURDIR):$(CURDIR)/tests/bench
gpu: export PYTHONSAFEPATH := 1
gpu:   ## what wants a GPU: the checks of tests/gpu, then docs/measured/gpu.md. Without one: the same checks on the CPU
	@$(GPU_PYTHON) -c 'import pydantic, xxhash' 2>/dev/null || $(GPU_PYTHON) -m pip install -q --disable-pip-version-check --target build/gpu \
		$(if $(wildcard .whl),--no-index --find-links .whl) 'pydantic>=2.6' 'xxhash>=3'
	@status=0; $(GPU_PYTHON) -m pytest -q -o pythonpath='build/gpu .' -W default tests/gpu || status=$$?; \
		$(GPU_PYTHON) tests/bench/gpu.py && exit $$status

hostile: $(READY)   ## hostile specs and compiled folders: each refused with a place, none runs anything; EXAMPLES random ones of each besides
	$(BIN)/python -m tests.spec.hostile $(or $(EXAMPLES),800)
	$(BIN)/python -m tests.artifact.hostile $(or $(EXAMPLES),800)

fuzz: $(READY)   ## random specs of every model, or of MODELS, against one device: what differs is shrunk to the smallest spec that does
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal tests/test_any_spec.py --fuzz $(or $(EXAMPLES),50) --fuzz-models '$(MODELS)'

graphs: $(READY)   ## random graphs of the ops that have rules, on random specs, against one device and the proof, for SECONDS from SEED
	$(BIN)/python -m tests.verify.op_graphs --seconds $(or $(SECONDS),600) --seed $(or $(SEED),0)

ops: $(READY)   ## docs/measured/ops.md: PyTorch's operator database by shardc and by DTensor, each case against one device
	$(BIN)/python -m tests.op_db.board $(if $(ONLY),--only '$(ONLY)')

faults: $(READY)   ## damaged and hostile checkpoints, faults at every call that reaches the disk, ranks that are killed, stopped, raise or differ
	$(BIN)/python tests/runtime/state/faults.py
	$(BIN)/python -m tests.cli.fault_table --kills 100 --steps 400
	$(BIN)/python -m tests.cli.fault_table
	$(BIN)/torchrun --nproc-per-node 4 --module tests.runtime.mesh.differences

mutants: $(READY)   ## programs broken in every way that we thought of, and who notices: EACH of a kind, model and setting; MODELS; KEPT=FILE: in pieces of MINUTES
	$(BIN)/python -m tests.verify.mutants --write --each $(or $(EACH),2) --models '$(or $(MODELS),gpt llama bert t5 mixtral resnet lstm vit unet mamba)' $(if $(KEPT),--kept $(KEPT) --minutes $(or $(MINUTES),5))

lint: $(READY) types
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy shardc

.venv/.peers: $(READY)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	@touch $@

bench: .venv/.peers
	$(BIN)/python tests/bench/bench.py

table: $(READY)   ## docs/measured/models.md and memory.md, and the generated blocks of the other pages (docs/generate.py)
	$(BIN)/python tests/bench/models.py
	$(BIN)/python tests/bench/memory.py
	$(BIN)/python docs/generate.py

support: $(READY)   ## the table of docs/reference/support.md: a small model compiled and proven for each pair of features, in minutes
	$(BIN)/python docs/support.py

.venv/.docs: $(READY)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

docs: .venv/.docs   ## the site, in build/docs; a warning (a broken link above all) is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

clean:
	rm -rf build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
