# `make train` and `make test` set up .venv by themselves.
PYTHON ?= python3
# The Python versions that `requires-python` promises.
PYTHON_VERSIONS := 3.11 3.12
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test lint docs bench soak resolve setup clean

train: setup
	$(BIN)/rllib train file configs/quickstart.yaml

test: setup $(VENV)/.system
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site in site/; broken links and references are errors. Nothing is downloaded.
docs: setup
	$(BIN)/python docs/scripts/settings.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: setup
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[benchmark]'
	$(BIN)/python benchmarks/all.py

# Ten minutes of kills, hangs, bad data and full disks, and what became of every step. As root it
# mounts a small disk to fill. MINUTES=30 takes longer.
MINUTES := 10
soak: setup
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES)

# Whether the pins of constraints.txt can be installed on every Python version that is promised. It
# needs the network, reads metadata only and takes seconds.
resolve: setup
	$(BIN)/pip install --quiet --constraint constraints.txt uv
	set -e; for version in $(PYTHON_VERSIONS); do \
		$(BIN)/uv pip compile --quiet --all-extras --only-binary :all: \
			--python-version $$version --python-platform x86_64-manylinux_2_28 \
			--constraint constraints.txt pyproject.toml --output-file $(VENV)/resolved-$$version.txt; \
		echo "Python $$version: $$(grep -c == $(VENV)/resolved-$$version.txt) packages"; \
	done

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import platform, sys; v = platform.python_version(); \
		sys.exit(not any(v.startswith(p + ".") for p in sys.argv[1:]) and \
		f"This is Python {v}, but one of $(PYTHON_VERSIONS) is needed: make PYTHON=python3.11")' \
		$(PYTHON_VERSIONS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test,docs]'
	touch $@

# Programs of Debian that tests of the dashboard use; where they cannot be installed, these are skipped.
# Where systemd runs, Debian's package would start a Prometheus of the machine's own: there it is left
# to the user.
SYSTEM_PACKAGES := chromium chromium-driver prometheus
APT_GET := apt-get --yes --no-install-recommends -o Acquire::http::Timeout=20 -o Acquire::Retries=1
$(VENV)/.system: | setup
	@if [ "$$(id -u)" = 0 ] && [ ! -d /run/systemd/system ] && command -v apt-get > /dev/null && \
		! (command -v chromium && command -v chromedriver && command -v prometheus) > /dev/null; then \
		export DEBIAN_FRONTEND=noninteractive; \
		install="$(APT_GET) install $(SYSTEM_PACKAGES)"; \
		{ $$install || { $(APT_GET) update && $$install; }; } > $@.log 2>&1 < /dev/null || \
		echo "$(SYSTEM_PACKAGES) cannot be installed ($@.log): tests that need them are skipped."; \
	fi
	@touch $@

clean:
	rm -rf $(VENV)
