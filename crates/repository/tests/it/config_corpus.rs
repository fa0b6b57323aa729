//! Configurations as found in the wild, each with all messages about it.
//!
//! `corpus/NAME.pbtxt` is put into a model folder; `corpus/NAME.txt` is the expected result.
//! A first line `# model: INPUT TYPE [DIMS]; ... -> OUTPUT TYPE [DIMS]; ...` gives the model file's
//! signature, from which the server completes the configuration.
//! `UPDATE_GOLDEN=1 cargo test -p downbeat-repository` writes the expectations anew; read the
//! difference.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use downbeat_core::tensor::{Signature, TensorSpec};
use downbeat_repository::{ModelDefinition, ModelRepository, TensorBinding};

/// A repository with one model of two versions, labels and warm-up data.
fn repository(name: &str, config: &[u8]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join(name);
    for version in ["1", "3"] {
        fs::create_dir_all(model.join(version)).unwrap();
        fs::write(model.join(version).join("model.onnx"), b"not read here").unwrap();
        fs::write(model.join(version).join("model.emulated.json"), b"not read here").unwrap();
    }
    fs::create_dir(model.join("warmup")).unwrap();
    fs::write(model.join("warmup/x.bin"), [0; 16]).unwrap();
    fs::write(model.join("labels.txt"), "cat\ndog\n").unwrap();
    fs::write(model.join("config.pbtxt"), config).unwrap();
    folder
}

fn signature(config: &str) -> Option<Signature> {
    let line = config.trim_start_matches('\u{feff}').lines().next()?.strip_prefix("# model: ")?;
    let (inputs, outputs) = line.split_once(" -> ").unwrap();
    let specs = |text: &str| {
        text.split("; ")
            .map(|spec| {
                let parts: Vec<&str> = spec.split(' ').collect();
                let dims = parts[2].trim_matches(['[', ']']);
                TensorSpec {
                    name: parts[0].to_owned(),
                    datatype: parts[1].parse().unwrap(),
                    dims: dims.split(',').filter(|d| !d.is_empty()).map(|d| d.parse().unwrap()).collect(),
                }
            })
            .collect()
    };
    Some(Signature { inputs: specs(inputs), outputs: specs(outputs) })
}

fn describe(definition: &ModelDefinition) -> String {
    let mut out = String::new();
    let d = definition;
    let versions: Vec<u64> = d.versions.iter().map(|(v, _)| *v).collect();
    writeln!(out, "versions: {versions:?} ({:?})", d.format).unwrap();
    writeln!(out, "instances: {}; SLO: {:?}; dispatch: {:?}; drop: {:?}", d.instances, d.slo, d.dispatch, d.drop)
        .unwrap();
    let b = &d.batching;
    writeln!(
        out,
        "batches: up to {}, dynamic: {}, preferred: {:?}, delay: {}",
        b.max_batch_size, b.dynamic, b.preferred, b.max_queue_delay
    )
    .unwrap();
    for (i, level) in b.levels.iter().enumerate() {
        writeln!(
            out,
            "level {}{}: at most {}, {:?} after {}, override: {}",
            i + 1,
            if i == b.default_level { " (default)" } else { "" },
            level.max_queue_size,
            level.timeout_action,
            level.default_timeout,
            level.allow_timeout_override
        )
        .unwrap();
    }
    let tensor = |out: &mut String, side: &str, b: &TensorBinding| {
        let TensorSpec { name, datatype, dims } = &b.client;
        write!(out, "{side} {name} {datatype} {dims:?}").unwrap();
        if b.is_reshaped() {
            write!(out, " -> model {:?}", b.model_dims).unwrap();
        }
        writeln!(out, "{}", if b.labels.is_empty() { String::new() } else { format!(" labels {:?}", b.labels) })
            .unwrap();
    };
    d.inputs.iter().for_each(|b| tensor(&mut out, "input", b));
    d.outputs.iter().for_each(|b| tensor(&mut out, "output", b));
    for w in &d.warmups {
        writeln!(out, "warm-up '{}': {} x batch {}, {:?}", w.name, w.count, w.batch_size, w.inputs.keys()).unwrap();
    }
    if let Some(options) = &d.tensorrt {
        writeln!(out, "TensorRT: {options:?}").unwrap();
    }
    for warning in &d.warnings {
        writeln!(out, "warning: {warning}").unwrap();
    }
    out
}

fn outcome(file: &Path) -> String {
    let name = file.file_stem().unwrap().to_str().unwrap();
    let config = fs::read(file).unwrap();
    let folder = repository(name, &config);
    // Some configurations are for a server with GPUs.
    let gpus = if name.starts_with("gpu_") { vec![0, 1] } else { Vec::new() };
    let result = ModelRepository::open(folder.path()).unwrap().with_gpus(gpus).definition(name, None);
    let text = match result {
        Err(error) => format!("errors:\n{error}\n"),
        Ok(mut definition) => match signature(&String::from_utf8_lossy(&config)) {
            None => describe(&definition),
            Some(signature) => match definition.complete(&signature) {
                Ok(()) => describe(&definition),
                Err(error) => format!("errors on completion:\n{error}\n"),
            },
        },
    };
    let real = folder.path().canonicalize().unwrap();
    text.replace(&format!("{}/{name}", real.display()), "MODEL")
        .replace(&format!("{}/{name}", folder.path().display()), "MODEL")
}

#[test]
fn each_configuration_has_its_expected_outcome() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/corpus");
    let mut files: Vec<PathBuf> = fs::read_dir(&corpus).unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "pbtxt"));
    files.sort();
    assert!(files.len() > 30, "the corpus is missing");
    let mut differing = Vec::new();
    for file in files {
        let outcome = outcome(&file);
        let golden = file.with_extension("txt");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::write(&golden, &outcome).unwrap();
        } else {
            let expected = fs::read_to_string(&golden).unwrap_or_default();
            if outcome != expected {
                differing.push(format!("{}\n--- expected\n{expected}--- got\n{outcome}", file.display()));
            }
        }
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}
