//! What an ONNX file says about itself: every message of it is walked, no tensor is read.

use std::collections::BTreeSet;
use std::io::{BufRead, Seek};

use super::wire::{Reader, Value, WireError};

/// Deepest nesting of graphs in attributes (`If`, `Loop`, `Scan`) that is accepted; engines recurse at each.
const DEPTH_LIMIT: u32 = 16;

/// An ONNX file, tensors left out.
#[derive(Debug, Default)]
pub(super) struct OnnxFile {
    pub ir_version: Option<i64>,
    /// Imported operator sets: domain and version.
    pub opsets: Vec<(String, i64)>,
    pub graph: Option<Graph>,
    /// Tensors that are kept in other files, wherever in the model they are.
    pub external: Vec<External>,
    /// Whether a tensor or an operator has 8-bit floats, wherever in the model.
    pub has_floats8: bool,
    /// Whether an operator has a graph inside (`If`, `Loop`, `Scan`).
    pub has_graphs: bool,
}

/// The top graph.
#[derive(Debug, Default)]
pub(super) struct Graph {
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

/// What a value is.
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
    let mut file = parser.model(len)?;
    file.external = parser.external;
    file.has_floats8 = parser.has_floats8;
    file.has_graphs = parser.has_graphs;
    Ok(file)
}

struct Parser<R> {
    reader: Reader<R>,
    external: Vec<External>,
    has_floats8: bool,
    has_graphs: bool,
}

/// Whether a `TensorProto.DataType` is one of floats of 8 bits.
fn is_float8(element: i64) -> bool {
    (17..=20).contains(&element)
}

impl<R: BufRead + Seek> Parser<R> {
    /// Calls `visit` with each field of the message that ends at `end`. `visit` has to consume what it is given.
    fn fields(
        &mut self,
        end: u64,
        mut visit: impl FnMut(&mut Self, u64, Value) -> Result<(), WireError>,
    ) -> Result<(), WireError> {
        while let Some((number, value)) = self.reader.field(end)? {
            visit(self, number, value)?;
        }
        Ok(())
    }

    /// Where the message in `value` ends.
    fn end(&self, value: Value) -> Result<u64, WireError> {
        match value {
            Value::Length(len) => Ok(self.reader.position() + len),
            _ => Err(WireError::Invalid(self.reader.position())),
        }
    }

    fn string(&mut self, value: Value) -> Result<String, WireError> {
        match value {
            Value::Length(len) => self.reader.string(len),
            _ => Err(WireError::Invalid(self.reader.position())),
        }
    }

    fn integer(&self, value: Value) -> Result<i64, WireError> {
        match value {
            Value::Varint(n) => Ok(n.cast_signed()),
            _ => Err(WireError::Invalid(self.reader.position())),
        }
    }

    fn model(&mut self, end: u64) -> Result<OnnxFile, WireError> {
        let mut file = OnnxFile::default();
        self.fields(end, |p, number, value| {
            match number {
                1 => file.ir_version = Some(p.integer(value)?),
                7 => {
                    let end = p.end(value)?;
                    file.graph = Some(p.graph(end, 0)?);
                }
                8 => {
                    let end = p.end(value)?;
                    let (mut domain, mut version) = (String::new(), 0);
                    p.fields(end, |p, number, value| {
                        match number {
                            1 => domain = p.string(value)?,
                            2 => version = p.integer(value)?,
                            _ => p.reader.skip(value)?,
                        }
                        Ok(())
                    })?;
                    file.opsets.push((domain, version));
                }
                14 => {
                    let end = p.end(value)?;
                    p.entry(end)?;
                }
                25 => {
                    let end = p.end(value)?;
                    p.function(end)?;
                }
                _ => p.reader.skip(value)?,
            }
            Ok(())
        })?;
        Ok(file)
    }

    fn function(&mut self, end: u64) -> Result<(), WireError> {
        self.fields(end, |p, number, value| match number {
            7 => {
                let end = p.end(value)?;
                p.node(end, 0)
            }
            11 => {
                let end = p.end(value)?;
                p.attribute(end, 0)
            }
            _ => p.reader.skip(value),
        })
    }

    fn graph(&mut self, end: u64, depth: u32) -> Result<Graph, WireError> {
        if depth > DEPTH_LIMIT {
            return Err(WireError::TooDeep(DEPTH_LIMIT));
        }
        let mut graph = Graph::default();
        self.fields(end, |p, number, value| {
            match number {
                1 => {
                    let end = p.end(value)?;
                    graph.nodes += 1;
                    p.node(end, depth)?;
                }
                5 => {
                    let end = p.end(value)?;
                    let name = p.tensor(end)?;
                    graph.initializers.insert(name);
                }
                11..=13 => {
                    let end = p.end(value)?;
                    let info = p.value_info(end)?;
                    match number {
                        11 => graph.inputs.push(info),
                        12 => graph.outputs.push(info),
                        _ => {}
                    }
                }
                15 => {
                    let end = p.end(value)?;
                    let name = p.sparse_tensor(end)?;
                    graph.initializers.insert(name);
                }
                16 => {
                    let end = p.end(value)?;
                    p.entry(end)?;
                }
                _ => p.reader.skip(value)?,
            }
            Ok(())
        })?;
        Ok(graph)
    }

    fn node(&mut self, end: u64, depth: u32) -> Result<(), WireError> {
        self.fields(end, |p, number, value| match number {
            5 => {
                let end = p.end(value)?;
                p.attribute(end, depth)
            }
            _ => p.reader.skip(value),
        })
    }

    fn attribute(&mut self, end: u64, depth: u32) -> Result<(), WireError> {
        let (mut is_datatype, mut number_in_it) = (false, None);
        self.fields(end, |p, number, value| {
            match number {
                1 => is_datatype = p.string(value)? == "output_dtype",
                3 => number_in_it = Some(p.integer(value)?),
                5 | 10 => {
                    let end = p.end(value)?;
                    p.tensor(end)?;
                }
                6 | 11 => {
                    p.has_graphs = true;
                    let end = p.end(value)?;
                    p.graph(end, depth + 1)?;
                }
                22 | 23 => {
                    let end = p.end(value)?;
                    p.sparse_tensor(end)?;
                }
                _ => p.reader.skip(value)?,
            }
            Ok(())
        })?;
        self.has_floats8 |= is_datatype && number_in_it.is_some_and(is_float8);
        Ok(())
    }

    /// Walks a tensor; returns its name.
    fn tensor(&mut self, end: u64) -> Result<String, WireError> {
        const EXTERNAL: i64 = 1;
        let mut external = External::default();
        let mut is_external = false;
        self.fields(end, |p, number, value| {
            match number {
                2 => p.has_floats8 |= is_float8(p.integer(value)?),
                8 => external.tensor = p.string(value)?,
                13 => {
                    // Also without the flag: what is named here, an engine might open.
                    is_external = true;
                    let end = p.end(value)?;
                    let at = p.reader.position();
                    let (key, text) = p.entry(end)?;
                    let number = |text: String| text.parse::<u64>().map_err(|_| WireError::Invalid(at));
                    match key.as_str() {
                        "location" => external.location = text,
                        "offset" => external.offset = number(text)?,
                        "length" => external.length = Some(number(text)?),
                        _ => {}
                    }
                }
                14 => is_external |= p.integer(value)? == EXTERNAL,
                _ => p.reader.skip(value)?,
            }
            Ok(())
        })?;
        let name = external.tensor.clone();
        if is_external {
            self.external.push(external);
        }
        Ok(name)
    }

    fn sparse_tensor(&mut self, end: u64) -> Result<String, WireError> {
        let mut name = String::new();
        self.fields(end, |p, number, value| {
            match number {
                1 | 2 => {
                    let end = p.end(value)?;
                    let tensor = p.tensor(end)?;
                    if number == 1 {
                        name = tensor;
                    }
                }
                _ => p.reader.skip(value)?,
            }
            Ok(())
        })?;
        Ok(name)
    }

    /// A key and its value.
    fn entry(&mut self, end: u64) -> Result<(String, String), WireError> {
        let (mut key, mut text) = (String::new(), String::new());
        self.fields(end, |p, number, value| {
            match (number, value) {
                (1, _) => key = p.string(value)?,
                // Metadata may hold whole documents; what is of use here is short.
                (2, Value::Length(len)) if len <= 4096 => text = p.string(value)?,
                _ => p.reader.skip(value)?,
            }
            Ok(())
        })?;
        Ok((key, text))
    }

    fn value_info(&mut self, end: u64) -> Result<ValueInfo, WireError> {
        let mut info = ValueInfo::default();
        self.fields(end, |p, number, value| {
            match number {
                1 => info.name = p.string(value)?,
                2 => {
                    let end = p.end(value)?;
                    info.kind = p.value_kind(end)?;
                }
                _ => p.reader.skip(value)?,
            }
            Ok(())
        })?;
        Ok(info)
    }

    fn value_kind(&mut self, end: u64) -> Result<ValueKind, WireError> {
        let mut kind = ValueKind::Unknown;
        self.fields(end, |p, number, value| {
            match number {
                1 => {
                    let end = p.end(value)?;
                    kind = p.tensor_type(end)?;
                }
                4 | 5 | 8 | 9 => {
                    kind = ValueKind::Other(match number {
                        4 => "sequence",
                        5 => "map",
                        8 => "sparse tensor",
                        _ => "optional",
                    });
                    p.reader.skip(value)?;
                }
                _ => p.reader.skip(value)?,
            }
            Ok(())
        })?;
        Ok(kind)
    }

    fn tensor_type(&mut self, end: u64) -> Result<ValueKind, WireError> {
        let mut element = 0;
        let mut dims = None;
        self.fields(end, |p, number, value| {
            match number {
                1 => element = p.integer(value)?,
                2 => {
                    let end = p.end(value)?;
                    let mut shape = Vec::new();
                    p.fields(end, |p, number, value| {
                        match number {
                            1 => {
                                let end = p.end(value)?;
                                shape.push(p.dimension(end)?);
                            }
                            _ => p.reader.skip(value)?,
                        }
                        Ok(())
                    })?;
                    dims = Some(shape);
                }
                _ => p.reader.skip(value)?,
            }
            Ok(())
        })?;
        Ok(ValueKind::Tensor { element, dims })
    }

    fn dimension(&mut self, end: u64) -> Result<i64, WireError> {
        let mut size = -1;
        self.fields(end, |p, number, value| {
            match number {
                1 => size = p.integer(value)?.max(-1),
                _ => p.reader.skip(value)?,
            }
            Ok(())
        })?;
        Ok(size)
    }
}
