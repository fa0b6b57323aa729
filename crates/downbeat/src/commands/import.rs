//! `downbeat import`: makes a model repository of a model file.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::Args;
use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_engine::onnx;
use downbeat_host::run::row_judgement::by_graph;
use downbeat_report::say;
use downbeat_repository::{ModelRepository, RowDependence};
use downbeat_server::escaped;

/// The largest batch that the configuration of a model with independent rows allows.
const MAX_BATCH: u32 = 32;

/// Make a model repository of an ONNX file, repaired if that is needed
///
/// `downbeat serve` repairs such a file at each load. This command does so once, and writes
/// DIR/NAME/1/model.onnx with a config.pbtxt that Triton reads, too.
#[derive(Args, Debug)]
pub struct ImportArgs {
    /// The model file
    file: PathBuf,
    /// The model repository
    #[arg(long, value_name = "DIR", default_value = "models")]
    output: PathBuf,
    /// The model's name; by default that of the file, or of its folder for a file model.onnx
    #[arg(long)]
    name: Option<String>,
}

/// Runs the command.
///
/// # Errors
/// If the file is no model or cannot be repaired exactly, or the repository cannot be written.
pub fn run(args: &ImportArgs) -> anyhow::Result<()> {
    let name = args.name.clone().or_else(|| name_of(&args.file)).context("give the model a name: --name NAME")?;
    ModelRepository::check_name(&name).with_context(|| format!("--name {name}"))?;
    let folder = args.output.join(&name);
    ensure!(
        fs::symlink_metadata(&folder).is_err(),
        "{} exists already; remove that folder, or give the model another name: --name NAME",
        folder.display()
    );
    let data = onnx::external_files(&args.file)?;
    let repair = downbeat_repair::repair(&args.file)?;
    let cannot = |what: &Path| format!("cannot write {}", what.display());
    fs::create_dir_all(&args.output).with_context(|| cannot(&args.output))?;
    // The repository never has half of a model.
    let made = tempfile::Builder::new().prefix(".import-").tempdir_in(&args.output);
    let made = made.with_context(|| cannot(&args.output))?;
    let version = made.path().join("1");
    let model = version.join("model.onnx");
    let write = || -> anyhow::Result<()> {
        fs::create_dir(&version)?;
        for location in &data {
            let to = version.join(location);
            fs::create_dir_all(to.parent().unwrap_or(&version))?;
            fs::copy(onnx::data_folder(&args.file).join(location), &to)?;
        }
        match &repair {
            None => drop(fs::copy(&args.file, &model)?),
            Some(repair) => {
                let mut file = BufWriter::new(File::create(&model)?);
                repair.write(&mut file)?;
                file.flush()?;
            }
        }
        Ok(())
    };
    write().with_context(|| cannot(&folder))?;
    let labels = repair.as_ref().map(|repair| repair.labels.clone()).unwrap_or_default();
    let config = Config::new(&name, &model, &labels)?;
    let files = config.label_files.iter().filter_map(|(output, file)| Some((file, labels.get(output)?)));
    for (file, classes) in files {
        let lines = classes.iter().map(|class| class.replace(['\n', '\r'], " ") + "\n");
        fs::write(made.path().join(file), lines.collect::<String>()).with_context(|| cannot(&folder.join(file)))?;
    }
    fs::write(made.path().join("config.pbtxt"), &config.text).with_context(|| cannot(&folder.join("config.pbtxt")))?;
    fs::set_permissions(made.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    fs::rename(made.path(), &folder).with_context(|| cannot(&folder))?;
    // The folder has another name now.
    let _ = made.keep();
    check(&args.output, &name, &config.signature)?;
    let done = repair.map_or_else(|| vec!["it needs no repair".to_owned()], |repair| repair.done);
    report(args, &folder, &config, &done)
}

/// The name of a model by its file: that of the file, or of a folder for names that say nothing.
fn name_of(file: &Path) -> Option<String> {
    let stem = file.file_stem()?.to_string_lossy().into_owned();
    if stem != "model" {
        return Some(stem);
    }
    let file = std::path::absolute(file).ok()?;
    let says = |folder: &&Path| folder.file_name().is_some_and(|name| name.to_string_lossy().parse::<u64>().is_err());
    let folder = file.parent()?.ancestors().take(2).find(says)?;
    Some(folder.file_name()?.to_string_lossy().into_owned())
}

/// Reads the repository as the server does.
fn check(repository: &Path, name: &str, signature: &Signature) -> anyhow::Result<()> {
    let mut definition = ModelRepository::open(repository)?.definition(name, None)?;
    Ok(definition.complete(signature)?)
}

fn report(args: &ImportArgs, folder: &Path, config: &Config, done: &[String]) -> anyhow::Result<()> {
    say(escaped(format_args!("{}: {}", folder.join("1/model.onnx").display(), done.join("; "))))?;
    say(escaped(format_args!("{}: {}", folder.join("config.pbtxt").display(), config.batches)))?;
    for (output, file) in &config.label_files {
        say(escaped(format_args!("{}: the classes of output '{output}'", folder.join(file).display())))?;
    }
    Ok(say(escaped(format_args!("serve it: downbeat serve {}", args.output.display())))?)
}

/// The configuration of a model.
struct Config {
    text: String,
    signature: Signature,
    /// The files of class names, by output.
    label_files: BTreeMap<String, String>,
    /// Whether requests share batches, in words.
    batches: String,
}

impl Config {
    fn new(name: &str, model: &Path, labels: &BTreeMap<String, Vec<String>>) -> anyhow::Result<Config> {
        let signature = onnx::inspect(model)?;
        let (max_batch, batches) = batching(model, &signature);
        let file = |index: usize| if index == 0 { "labels.txt".to_owned() } else { format!("labels-{index}.txt") };
        let has_labels = |output: &&TensorSpec| labels.contains_key(&output.name);
        let label_files: BTreeMap<String, String> = signature
            .outputs
            .iter()
            .filter(has_labels)
            .enumerate()
            .map(|(index, output)| (output.name.clone(), file(index)))
            .collect();
        let mut text = format!(
            "# Written by `downbeat import`: {batches}.\nname: {}\nplatform: \"onnxruntime_onnx\"\nmax_batch_size: {max_batch}\n",
            quoted(name)
        );
        for (field, specs) in [("input", &signature.inputs), ("output", &signature.outputs)] {
            for spec in specs {
                tensor(&mut text, field, spec, max_batch > 0, label_files.get(&spec.name))?;
            }
        }
        if max_batch > 0 {
            text.push_str("dynamic_batching { }\n");
        }
        Ok(Config { text, signature, label_files, batches })
    }
}

/// The largest batch, and the reason in words.
fn batching(model: &Path, signature: &Signature) -> (u32, String) {
    let mut specs = signature.inputs.iter().chain(&signature.outputs);
    if let Some(fixed) = specs.find(|spec| spec.dims.first() != Some(&-1)) {
        let size = fixed.dims.first().map_or("no dimension".to_owned(), |size| format!("the first dimension {size}"));
        return (0, format!("requests run alone, since '{}' has {size}", fixed.name));
    }
    match by_graph(model).0 {
        verdict if verdict.rows == RowDependence::Independent => {
            (MAX_BATCH, format!("batches of up to {MAX_BATCH} rows"))
        }
        verdict => (
            0,
            format!(
                "requests run alone, since they might change each other's answers ({}); without max_batch_size and without the first of \
                 the dims `downbeat serve` tries that",
                verdict.reason
            ),
        ),
    }
}

fn tensor(
    text: &mut String,
    field: &str,
    spec: &TensorSpec,
    is_batched: bool,
    labels: Option<&String>,
) -> anyhow::Result<()> {
    let dims: Vec<String> = spec.dims.iter().skip(usize::from(is_batched)).map(i64::to_string).collect();
    if dims.is_empty() && !is_batched {
        bail!(
            "{field} '{}' has no dimensions, which a configuration cannot say; put the file into the repository as it is: \
             NAME/1/model.onnx, without config.pbtxt",
            spec.name
        );
    }
    // Triton has no tensors without dimensions: one number a row is a row of one number.
    let (dims, reshape) =
        if dims.is_empty() { ("1".to_owned(), "\n  reshape { shape: [ ] }") } else { (dims.join(", "), "") };
    let r#type = if spec.datatype == DataType::Bytes { "STRING" } else { spec.datatype.name() };
    write!(
        text,
        "{field} {{\n  name: {}\n  data_type: TYPE_{type}\n  dims: [ {dims} ]{reshape}\n",
        quoted(&spec.name)
    )?;
    if let Some(file) = labels {
        writeln!(text, "  label_filename: {}", quoted(file))?;
    }
    text.push_str("}\n");
    Ok(())
}

/// A string of the text format.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            '\n' => quoted.push_str("\\n"),
            c if c.is_ascii_control() => quoted.push_str(&format!("\\{:03o}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_has_the_name_of_its_file_or_folder() {
        let name = |file: &str| name_of(Path::new(file));
        assert_eq!(name("/a/iris.onnx").as_deref(), Some("iris"));
        assert_eq!(name("/a/iris/model.onnx").as_deref(), Some("iris"));
        assert_eq!(name("/a/iris/1/model.onnx").as_deref(), Some("iris"));
        assert_eq!(name("/model.onnx"), None);
    }

    #[test]
    fn strings_of_a_configuration_are_quoted() {
        assert_eq!(quoted("a \"b\"\\\n\u{1}ä"), "\"a \\\"b\\\"\\\\\\n\\001ä\"");
    }
}
