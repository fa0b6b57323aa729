//! Reads ONNX files before any engine does: their signature, and their faults.

mod declared;
mod external;
mod file;
mod further_size_rules;
pub mod graph;
mod hazard;
mod held_file;
pub mod message;
pub mod proto;
pub(crate) mod rewrite;
mod rows;
mod size_rules;
pub(crate) mod sizes;
pub mod wire;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use downbeat_core::file_content::{self, FileContentError};
use downbeat_core::tensor::{DataType, Signature, TensorSpec};

use crate::traits::LoadError;
pub use declared::{Declared, DefaultValue, Opened};
pub(crate) use external::original;
pub use external::{ORIGINAL, data_folder};
use file::{OnnxFile, ValueInfo, ValueKind};
pub use hazard::hazard;
pub use held_file::{HeldFile, model_bytes};
pub use rows::{Cause, RowReport, Rows, row_report};

/// Largest model file: protocol buffers cannot be larger, and neither engine reads more.
pub const FILE_LIMIT: u64 = (1 << 31) - 1;

/// Reads inputs and outputs from the model file, without an engine: initialisers are no inputs,
/// sizes that vary are -1. The file is walked and checked, its tensors are not read: gigabytes of
/// garbage are refused at their first bytes.
///
/// # Errors
/// If the file cannot be read, is not an ONNX model, is truncated or larger than [`FILE_LIMIT`], or
/// names external data outside of its folder. If an input is not a tensor with a datatype and rank
/// in the file. If an output is not a tensor of a known datatype.
pub fn inspect(path: &Path) -> Result<Signature, LoadError> {
    check(path)?.signature(|_| None)
}

/// Bytes of the model file and the files of its external data: its weights, and little else.
///
/// # Errors
/// As [`inspect`].
pub fn file_bytes(path: &Path) -> Result<u64, LoadError> {
    let checked = walk(path)?;
    let folder = data_folder(path);
    let beside = checked.external_locations().collect::<BTreeSet<_>>().into_iter().map(|it| folder.join(it));
    let bytes = |file: PathBuf| Ok(std::fs::metadata(file)?.len());
    let sum = std::iter::once(path.to_owned()).chain(beside).map(bytes).sum::<std::io::Result<u64>>();
    sum.map_err(|e| LoadError::File { path: path.to_owned(), reason: format!("its files cannot be read: {e}") })
}

/// The files of a model's external data, relative to [`data_folder`].
///
/// # Errors
/// As [`inspect`], but inputs and outputs may be of any type.
pub fn external_files(path: &Path) -> Result<BTreeSet<String>, LoadError> {
    Ok(walk(path)?.external_locations().map(str::to_owned).collect())
}

/// The locations of external data that a file names, unchecked: the files may be missing, and a
/// location may lead anywhere. A file that is no ONNX model names none.
///
/// # Errors
/// If the model file cannot be read.
pub fn named_external_files(path: &Path) -> std::io::Result<BTreeSet<String>> {
    let opened = File::open(path)?;
    let len = opened.metadata()?.len();
    let external = file::read(BufReader::new(opened), len).map(|file| file.external).unwrap_or_default();
    Ok(external.into_iter().map(|tensor| tensor.location).collect())
}

/// A model file that was walked and found sound.
#[derive(Debug)]
pub struct Checked<'a> {
    path: &'a Path,
    file: OnnxFile,
}

/// Walks and checks the file. Every engine calls this before its own parser reads the file.
pub fn check(path: &Path) -> Result<Checked<'_>, LoadError> {
    let checked = walk(path)?;
    // Faults of inputs and outputs are reported here, in the same words for every engine.
    checked.signature(|_| Some((DataType::Fp32, Vec::new())))?;
    Ok(checked)
}

/// Walks the file and checks all of it but its inputs and outputs.
fn walk(path: &Path) -> Result<Checked<'_>, LoadError> {
    let error = |reason: String| LoadError::File { path: path.to_owned(), reason };
    // Checked before it is opened: opening a pipe would block.
    let metadata = std::fs::metadata(path).map_err(|e| error(format!("the model file cannot be read: {e}")))?;
    if !metadata.is_file() {
        return Err(error("not a regular file; expected an ONNX model".into()));
    }
    let len = metadata.len();
    if len == 0 {
        return Err(error("the file is empty; expected an ONNX model. Copy it again".into()));
    }
    if len > FILE_LIMIT {
        return Err(error(format!(
            "{len} bytes are more than a model file can have ({FILE_LIMIT}, protobuf's limit). If it is an ONNX model, save its \
             weights as external data: onnx.save(model, path, save_as_external_data=True)"
        )));
    }
    refuse_lfs_pointer(path, len).map_err(|e| error(format!("the file {e}")))?;
    let opened = File::open(path).map_err(|e| error(format!("the model file cannot be read: {e}")))?;
    let file = file::read(BufReader::new(opened), len).map_err(|e| not_a_model(path, e))?;
    let missing = |what: &str| {
        error(format!(
            "not an ONNX model: the file has no {what}; it is truncated or of another format. Export or copy it again"
        ))
    };
    match &file.graph {
        None => return Err(missing("graph")),
        Some(graph) if graph.outputs.is_empty() => return Err(missing("output")),
        Some(_) => {}
    }
    match file.ir_version {
        None => return Err(missing("IR version")),
        // Far above any future version: the file is corrupt. The engine rejects versions that are
        // too new for it.
        Some(version) if !(1..=1000).contains(&version) => {
            return Err(error(format!(
                "IR version {version} does not exist; the file is corrupt. Export or copy it again"
            )));
        }
        Some(_) => {}
    }
    external::check(path, &file.external).map_err(error)?;
    Ok(Checked { path, file })
}

/// Reads the whole of a checked model file, without its external data.
fn read_whole(path: &Path) -> Result<Bytes, LoadError> {
    model_bytes(path)
        .map_err(|e| LoadError::File { path: path.to_owned(), reason: format!("the model file cannot be read: {e}") })
}

fn not_a_model(path: &Path, error: impl Display) -> LoadError {
    let reason = format!("not an ONNX model that can be loaded: {error}. Export or copy it again");
    LoadError::File { path: path.to_owned(), reason }
}

/// Refuses a file of `len` bytes that is a git-lfs pointer.
fn refuse_lfs_pointer(path: &Path, len: u64) -> Result<(), FileContentError> {
    if len > file_content::LFS_POINTER_LIMIT {
        return Ok(());
    }
    // The reader of the file reports a file that cannot be read.
    std::fs::read(path).map_or(Ok(()), |bytes| file_content::refuse_lfs_pointer(&bytes))
}

impl Checked<'_> {
    /// The locations of its external data, relative to the model's folder; one for each tensor.
    pub fn external_locations(&self) -> impl Iterator<Item = &str> {
        self.file.external.iter().map(|e| e.location.as_str())
    }

    /// Whether it has 8-bit floats inside.
    pub fn has_floats8(&self) -> bool {
        self.file.has_floats8
    }

    /// Whether the time of a run may depend on the values of its inputs: an operator repeats a
    /// graph, or chooses among graphs.
    pub fn has_graphs(&self) -> bool {
        self.file.has_graphs
    }

    /// The version of the format.
    pub fn ir_version(&self) -> i64 {
        self.file.ir_version.unwrap_or_default()
    }

    /// The requested version of the standard operators; 0 if there is none.
    pub fn opset(&self) -> i64 {
        self.file.opsets.iter().find(|(domain, _)| standard_domain(domain)).map_or(0, |(_, version)| *version)
    }

    /// Inputs and outputs. `infer(i)` may give the datatype and sizes of output `i` if the file
    /// does not say.
    pub fn signature(&self, infer: impl Fn(usize) -> Option<(DataType, Vec<i64>)>) -> Result<Signature, LoadError> {
        self.signature_with(&Declared::default(), infer)
    }

    /// The signature, with the sizes and values that the configuration declares.
    fn signature_with(
        &self,
        declared: &Declared,
        infer: impl Fn(usize) -> Option<(DataType, Vec<i64>)>,
    ) -> Result<Signature, LoadError> {
        let Some(graph) = &self.file.graph else { return Ok(Signature::default()) };
        let declared_of = |info: &ValueInfo| {
            let ValueKind::Tensor { element, .. } = info.kind else { return None };
            Some((datatype(element)?, declared.shapes.get(&info.name)?.clone()))
        };
        let inputs = graph
            .inputs
            .iter()
            .filter(|i| !graph.initializers.contains(&i.name) || declared.optional.contains(&i.name))
            .map(|i| self.spec("input", i, || declared_of(i)))
            .collect::<Result<_, _>>()?;
        let outputs = graph
            .outputs
            .iter()
            .enumerate()
            .map(|(index, o)| self.spec("output", o, || declared_of(o).or_else(|| inferred_output(o, infer(index)))))
            .collect::<Result<_, _>>()?;
        Ok(Signature { inputs, outputs })
    }

    fn spec(
        &self,
        what: &str,
        info: &ValueInfo,
        infer: impl FnOnce() -> Option<(DataType, Vec<i64>)>,
    ) -> Result<TensorSpec, LoadError> {
        let name = &info.name;
        let error = |reason: String| LoadError::File { path: self.path.to_owned(), reason };
        if name.is_empty() || name.contains('\0') {
            return Err(error(format!(
                "an {what} of the model has no valid name; the file is corrupt. Export it again"
            )));
        }
        let (datatype, dims) = match &info.kind {
            ValueKind::Tensor { element, dims: Some(dims) } => {
                let datatype = datatype(*element).ok_or_else(|| {
                    error(format!(
                        "{what} '{name}' has ONNX element type {}, which the Open Inference Protocol does not have; expected one of {}. Inside a model it may be used: \
                         add a Cast or DequantizeLinear",
                        element_name(*element),
                        DataType::ALL.map(DataType::name).join(", ")
                    ))
                })?;
                (datatype, dims.clone())
            }
            ValueKind::Other(kind) => {
                return Err(error(format!(
                    "{what} '{name}' is a {kind}; only tensors can be served. For scikit-learn models, convert with the option zipmap=False"
                )));
            }
            ValueKind::Tensor { .. } | ValueKind::Unknown => infer().ok_or_else(|| {
                error(format!(
                    "{what} '{name}' has no shape in the file. Give its dims in config.pbtxt, or add it: onnx.save(onnx.shape_inference.infer_shapes(onnx.load(path)), path)"
                ))
            })?,
        };
        Ok(TensorSpec { name: name.clone(), datatype, dims })
    }
}

/// Whether a domain is that of the standard's operators.
pub fn standard_domain(domain: &str) -> bool {
    domain.is_empty() || domain == "ai.onnx"
}

/// An output without a shape in the file, as an engine inferred it. An engine that infers no shape
/// returns `[]`, or nothing. Such an output is declared as one dimension of any size, and its
/// answers are served with their own shapes.
fn inferred_output(info: &ValueInfo, inferred: Option<(DataType, Vec<i64>)>) -> Option<(DataType, Vec<i64>)> {
    let element = match info.kind {
        ValueKind::Tensor { element, .. } => datatype(element),
        ValueKind::Unknown | ValueKind::Other(_) => None,
    };
    let (its, dims) = inferred.map_or((None, Vec::new()), |(datatype, dims)| (Some(datatype), dims));
    Some((element.or(its)?, if dims.is_empty() { vec![-1] } else { dims }))
}

/// The datatype of an ONNX `TensorProto.DataType`; ONNX Runtime has the same numbers.
pub fn datatype(element: i64) -> Option<DataType> {
    DataType::ALL.into_iter().find(|d| i64::from(element_type(*d)) == element)
}

/// The name of an ONNX `TensorProto.DataType` that requests cannot have, with its number.
fn element_name(element: i64) -> String {
    let name = match element {
        14 => "COMPLEX64",
        15 => "COMPLEX128",
        17 => "FLOAT8E4M3FN",
        18 => "FLOAT8E4M3FNUZ",
        19 => "FLOAT8E5M2",
        20 => "FLOAT8E5M2FNUZ",
        21 => "UINT4",
        22 => "INT4",
        23 => "FLOAT4E2M1",
        24 => "FLOAT8E8M0",
        25 => "UINT2",
        26 => "INT2",
        other => return other.to_string(),
    };
    format!("{element} ({name})")
}

/// Bytes of an element of an ONNX `TensorProto.DataType` in memory, if that is a whole number. It
/// includes types that appear only inside of models.
pub fn element_size(element: i32) -> Option<usize> {
    match element {
        17..=20 => Some(1),
        other => datatype(other.into())?.size(),
    }
}

/// The ONNX `TensorProto.DataType` of a datatype.
pub const fn element_type(datatype: DataType) -> i32 {
    match datatype {
        DataType::Fp32 => 1,
        DataType::Uint8 => 2,
        DataType::Int8 => 3,
        DataType::Uint16 => 4,
        DataType::Int16 => 5,
        DataType::Int32 => 6,
        DataType::Int64 => 7,
        DataType::Bytes => 8,
        DataType::Bool => 9,
        DataType::Fp16 => 10,
        DataType::Fp64 => 11,
        DataType::Uint32 => 12,
        DataType::Uint64 => 13,
        DataType::Bf16 => 16,
    }
}
