//! The structure of an ONNX file: every message of it is walked, no tensor is read.

use std::collections::BTreeSet;
use std::io::{BufRead, Seek};

use super::wire::{Reader, WireError, WireValue};

/// The deepest accepted nesting of graphs in attributes (`If`, `Loop`, `Scan`); engines recurse at
/// each level.
const DEPTH_LIMIT: u32 = 16;

/// An ONNX file without its tensors.
#[derive(Debug, Default)]
pub(super) struct OnnxFile {
    pub ir_version: Option<i64>,
    /// Imported operator sets: domain and version.
    pub opsets: Vec<(String, i64)>,
    pub graph: Option<FileGraph>,
    /// Tensors that are kept in other files, anywhere in the model.
    pub external: Vec<External>,
    /// Whether a tensor or an operator anywhere in the model has 8-bit floats.
    pub has_floats8: bool,
    /// Whether an operator has a graph inside (`If`, `Loop`, `Scan`).
    pub has_graphs: bool,
}

/// The top graph.
#[derive(Debug, Default)]
pub(super) struct FileGraph {
    pub inputs: Vec<ValueInfo>,
    pub outputs: Vec<ValueInfo>,
    pub initializers: BTreeSet<String>,
    pub nodes: u64,
}

/// The declaration of an input or output.
#[derive(Debug, Default)]
pub(super) struct ValueInfo {
    pub name: String,
    pub kind: ValueKind,
}

/// The kind of a value.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum ValueKind {
    /// The file does not say.
    #[default]
    Unknown,
    Tensor {
        /// `TensorProto.DataType`.
        element: i64,
        /// Sizes, -1 where they vary; `None` if the file does not say.
        dims: Option<Vec<i64>>,
    },
    /// A sequence, map, optional or sparse tensor.
    Other(&'static str),
}

/// A tensor that is kept in another file.
#[derive(Debug, Default)]
pub(super) struct External {
    pub tensor: String,
    pub location: String,
    pub offset: u64,
    pub length: Option<u64>,
}

/// Walks the file of `len` bytes.
pub(super) fn read<R: BufRead + Seek>(from: R, len: u64) -> Result<OnnxFile, WireError> {
    let mut parser = Parser { reader: Reader::new(from), external: Vec::new(), has_floats8: false, has_graphs: false };
    let file = parser.model(WireValue::Length(len))?;
    let Parser { external, has_floats8, has_graphs, .. } = parser;
    Ok(OnnxFile { external, has_floats8, has_graphs, ..file })
}

struct Parser<R> {
    reader: Reader<R>,
    external: Vec<External>,
    has_floats8: bool,
    has_graphs: bool,
}

/// Whether a `TensorProto.DataType` is a float of 8 bits.
fn is_float8(element: i64) -> bool {
    (17..=20).contains(&element)
}

impl<R: BufRead + Seek> Parser<R> {
    fn invalid<T>(&self) -> Result<T, WireError> {
        Err(WireError::Invalid(self.reader.position()))
    }

    /// Calls `visit` with each field of a message. Bytes that `visit` does not read are skipped.
    fn fields(
        &mut self,
        message: WireValue,
        mut visit: impl FnMut(&mut Self, u64, WireValue) -> Result<(), WireError>,
    ) -> Result<(), WireError> {
        let WireValue::Length(len) = message else { return self.invalid() };
        let end = self.reader.position() + len;
        while let Some((number, value)) = self.reader.field(end)? {
            let start = self.reader.position();
            visit(self, number, value)?;
            if let WireValue::Length(len) = value {
                self.reader.skip_to(start + len)?;
            }
        }
        Ok(())
    }

    fn string(&mut self, value: WireValue) -> Result<String, WireError> {
        match value {
            WireValue::Length(len) => self.reader.string(len),
            _ => self.invalid(),
        }
    }

    fn integer(&self, value: WireValue) -> Result<i64, WireError> {
        match value {
            WireValue::Varint(n) => Ok(n.cast_signed()),
            _ => self.invalid(),
        }
    }

    fn model(&mut self, model: WireValue) -> Result<OnnxFile, WireError> {
        let mut file = OnnxFile::default();
        self.fields(model, |p, number, value| {
            match number {
                1 => file.ir_version = Some(p.integer(value)?),
                7 => file.graph = Some(p.graph(value, 0)?),
                8 => file.opsets.push(p.opset(value)?),
                14 => drop(p.entry(value)?),
                25 => p.function(value)?,
                _ => {}
            }
            Ok(())
        })?;
        Ok(file)
    }

    fn opset(&mut self, opset: WireValue) -> Result<(String, i64), WireError> {
        let (mut domain, mut version) = (String::new(), 0);
        self.fields(opset, |p, number, value| {
            match number {
                1 => domain = p.string(value)?,
                2 => version = p.integer(value)?,
                _ => {}
            }
            Ok(())
        })?;
        Ok((domain, version))
    }

    fn function(&mut self, function: WireValue) -> Result<(), WireError> {
        self.fields(function, |p, number, value| match number {
            7 => p.node(value, 0),
            11 => p.attribute(value, 0),
            _ => Ok(()),
        })
    }

    fn graph(&mut self, message: WireValue, depth: u32) -> Result<FileGraph, WireError> {
        if depth > DEPTH_LIMIT {
            return Err(WireError::TooDeep(DEPTH_LIMIT));
        }
        let mut graph = FileGraph::default();
        self.fields(message, |p, number, value| {
            match number {
                1 => {
                    graph.nodes += 1;
                    p.node(value, depth)?;
                }
                5 => graph.initializers.extend([p.tensor(value)?]),
                11 => graph.inputs.push(p.value_info(value)?),
                12 => graph.outputs.push(p.value_info(value)?),
                13 => drop(p.value_info(value)?),
                15 => graph.initializers.extend([p.sparse_tensor(value)?]),
                16 => drop(p.entry(value)?),
                _ => {}
            }
            Ok(())
        })?;
        Ok(graph)
    }

    fn node(&mut self, node: WireValue, depth: u32) -> Result<(), WireError> {
        self.fields(node, |p, number, value| if number == 5 { p.attribute(value, depth) } else { Ok(()) })
    }

    fn attribute(&mut self, attribute: WireValue, depth: u32) -> Result<(), WireError> {
        let (mut is_datatype, mut number_in_it) = (false, None);
        self.fields(attribute, |p, number, value| {
            match number {
                1 => is_datatype = p.string(value)? == "output_dtype",
                3 => number_in_it = Some(p.integer(value)?),
                5 | 10 => drop(p.tensor(value)?),
                6 | 11 => {
                    p.has_graphs = true;
                    p.graph(value, depth + 1)?;
                }
                22 | 23 => drop(p.sparse_tensor(value)?),
                _ => {}
            }
            Ok(())
        })?;
        self.has_floats8 |= is_datatype && number_in_it.is_some_and(is_float8);
        Ok(())
    }

    /// Walks a tensor; returns its name.
    fn tensor(&mut self, tensor: WireValue) -> Result<String, WireError> {
        const EXTERNAL: i64 = 1;
        let mut external = External::default();
        let mut is_external = false;
        self.fields(tensor, |p, number, value| {
            match number {
                2 => p.has_floats8 |= is_float8(p.integer(value)?),
                8 => external.tensor = p.string(value)?,
                13 => {
                    // The flag is not needed: an engine might open any location that is named here.
                    is_external = true;
                    let at = p.reader.position();
                    let (key, text) = p.entry(value)?;
                    let number = |text: String| text.parse::<u64>().map_err(|_| WireError::Invalid(at));
                    match key.as_str() {
                        "location" => external.location = text,
                        "offset" => external.offset = number(text)?,
                        "length" => external.length = Some(number(text)?),
                        _ => {}
                    }
                }
                14 => is_external |= p.integer(value)? == EXTERNAL,
                _ => {}
            }
            Ok(())
        })?;
        let name = external.tensor.clone();
        if is_external {
            self.external.push(external);
        }
        Ok(name)
    }

    /// Walks a sparse tensor; returns the name of its values.
    fn sparse_tensor(&mut self, tensor: WireValue) -> Result<String, WireError> {
        let mut name = String::new();
        self.fields(tensor, |p, number, value| {
            match number {
                1 => name = p.tensor(value)?,
                2 => drop(p.tensor(value)?),
                _ => {}
            }
            Ok(())
        })?;
        Ok(name)
    }

    /// A key and its value.
    fn entry(&mut self, entry: WireValue) -> Result<(String, String), WireError> {
        let (mut key, mut text) = (String::new(), String::new());
        self.fields(entry, |p, number, value| {
            match (number, value) {
                (1, _) => key = p.string(value)?,
                // Metadata may hold whole documents; the useful texts are short.
                (2, WireValue::Length(len)) if len <= 4096 => text = p.string(value)?,
                _ => {}
            }
            Ok(())
        })?;
        Ok((key, text))
    }

    fn value_info(&mut self, message: WireValue) -> Result<ValueInfo, WireError> {
        let mut info = ValueInfo::default();
        self.fields(message, |p, number, value| {
            match number {
                1 => info.name = p.string(value)?,
                2 => info.kind = p.value_kind(value)?,
                _ => {}
            }
            Ok(())
        })?;
        Ok(info)
    }

    fn value_kind(&mut self, message: WireValue) -> Result<ValueKind, WireError> {
        let mut kind = ValueKind::Unknown;
        self.fields(message, |p, number, value| {
            match number {
                1 => kind = p.tensor_type(value)?,
                4 => kind = ValueKind::Other("sequence"),
                5 => kind = ValueKind::Other("map"),
                8 => kind = ValueKind::Other("sparse tensor"),
                9 => kind = ValueKind::Other("optional"),
                _ => {}
            }
            Ok(())
        })?;
        Ok(kind)
    }

    fn tensor_type(&mut self, message: WireValue) -> Result<ValueKind, WireError> {
        let (mut element, mut dims) = (0, None);
        self.fields(message, |p, number, value| {
            match number {
                1 => element = p.integer(value)?,
                2 => dims = Some(p.shape(value)?),
                _ => {}
            }
            Ok(())
        })?;
        Ok(ValueKind::Tensor { element, dims })
    }

    fn shape(&mut self, shape: WireValue) -> Result<Vec<i64>, WireError> {
        let mut dims = Vec::new();
        self.fields(shape, |p, number, dimension| {
            if number != 1 {
                return Ok(());
            }
            let mut size = -1;
            p.fields(dimension, |p, number, value| {
                if number == 1 {
                    size = p.integer(value)?.max(-1);
                }
                Ok(())
            })?;
            dims.push(size);
            Ok(())
        })?;
        Ok(dims)
    }
}
