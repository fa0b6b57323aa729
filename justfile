# Commands for work on Downbeat. `just` lists them; each is also plain shell that can be copied from here.

venv := justfile_directory() / "target/clients-venv"

_default:
    @just --list

# Serve the example models on ports 8000, 8001 and 8002.
serve *arguments:
    cargo run --release -- serve examples/models {{arguments}}

# Format the code.
fmt:
    cargo fmt --all

# What CI checks before it runs tests.
lint:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    cargo clippy --workspace --all-targets --features downbeat/ucx,downbeat/retraining -- -D warnings

# The Rust tests.
test *arguments:
    cargo test --workspace {{arguments}}

# The lab: figures of the papers, published schedulers, emulated GPUs. `just lab --help` lists its commands.
lab *arguments:
    cargo run --release -p downbeat-lab -- {{arguments}}

# The engine's tests for GPUs with onnxruntime's own provider for them, without a GPU: on stand-ins of NVIDIA's libraries. Fetches 255 MB once.
gpu-stand-ins *arguments:
    lab/nvidia-stand-ins/run.sh cargo test -p downbeat-engine-ort --test it gpu:: {{arguments}}

# The driver's shared places under loom, which tries every order of their steps.
loom:
    cargo test -p downbeat-loom

# The documentation of every crate, warnings as errors.
doc:
    RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --workspace

# The pages as a site, target/book/book/index.html. Needs mdBook (cargo install mdbook).
book *arguments:
    tools/book.py --build target/book {{arguments}}

# The tests with real clients (Python) against a release build.
clients *arguments: (_venv "tests/clients/requirements.txt")
    cargo build --release -p downbeat
    {{venv}}/bin/python -m pytest tests/clients {{arguments}}

# What a request costs, without a clock, beside lab/gate/counts.toml; `just counts --write` writes it there. Needs valgrind.
counts *arguments:
    cargo build --profile ci -p downbeat -p downbeat-gate
    target/ci/downbeat-gate {{arguments}}

# libFuzzer on each way to read bytes, or on those named, for `seconds` each. Needs cargo-fuzz (cargo install cargo-fuzz) and a C++ compiler.
fuzz seconds="60" *targets:
    fuzz/run.sh {{seconds}} {{targets}}

# Good and bad requests, models loaded and unloaded, clients that go away, for ten minutes; judges memory, threads, files and answers.
soak *arguments: (_venv "tests/clients/requirements.txt")
    cargo build --release -p downbeat
    {{venv}}/bin/python tests/clients/soak.py {{arguments}}

# Write the example models again.
examples: (_venv "tools/requirements.txt")
    {{venv}}/bin/python tools/make_examples.py

# Compare verdicts on whether rows depend on each other with ONNX Runtime, on random graphs.
rows *arguments: (_venv "tools/requirements.txt")
    cargo build -p downbeat-engine --example rows
    {{venv}}/bin/python tools/check_rows.py {{arguments}}

# Write the larger graphs to target/zoo.
zoo *models: (_venv "tools/requirements.txt")
    {{venv}}/bin/python tools/zoo.py --check target/zoo {{models}}

# Load on a running server: `just bench --help`.
bench *arguments:
    cargo run --release -- bench {{arguments}}

# Flat-top behaviour with autoscale advice: lab/docs/flat_top.svg.
flat-top:
    cargo run --release -p downbeat-lab --example flat_top -- lab/docs/flat_top.svg

# Figure 16: how even partitions are. Needs cmake and libclang, for the solver.
figure-16 *arguments:
    cargo run --release -p downbeat-lab --features highs --example figure_16 -- {{arguments}}

# Packages for releases, in target/packages: the wheel, the archives of the program and of its debug information, the Debian package.
dist *arguments:
    packaging/build.sh {{arguments}}

# A container image of the archive of `just dist`, without Docker, in target/packages; `just image --engine cpu` has ONNX Runtime.
image *arguments:
    packaging/image.sh {{arguments}}

# From nothing to the first right answer of one's own model, with the packages of `just dist`: docs/results/install.md.
first-answer *arguments: (_venv "tests/clients/requirements.txt")
    {{venv}}/bin/python tools/first_answer.py --wheel target/packages/downbeat_server-*.whl --archive target/packages/downbeat-*-linux.tar.gz {{arguments}}

# Licences, advisories and sources of the dependencies (needs cargo-deny).
deny:
    cargo deny check

# Everything that CI runs.
ci:
    .ci/run

_venv requirements:
    tools/venv.sh {{venv}} --requirement {{requirements}}
