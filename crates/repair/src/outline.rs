//! The outline of a file: versions and outputs, without operators and weights.

use std::fs::File;
use std::io::{BufRead, BufReader, Seek};
use std::path::Path;

use downbeat_engine::onnx::wire::{Reader, WireError, WireValue};
use downbeat_engine::onnx::{FILE_LIMIT, standard_domain};
use prost::Message;

use crate::value::Value;
use crate::{NEWEST_IR, opset};

/// The largest description of an input or output that is read.
const VALUE_LIMIT: u64 = 1 << 20;

/// The domain of the operators of classical machine learning.
pub(crate) const ML: &str = "ai.onnx.ml";

/// Versions, inputs and outputs of a file.
#[derive(Debug, Default)]
pub(crate) struct Outline {
    /// Bytes of the file.
    pub len: u64,
    /// The version of the format.
    pub ir: i64,
    /// Imported operator sets: domain and version.
    pub opsets: Vec<(String, i64)>,
    /// Inputs, initialisers among them.
    pub inputs: Vec<Value>,
    /// Outputs.
    pub outputs: Vec<Value>,
    graphs: usize,
}

/// A reader of a model file.
pub(crate) type FileReader = Reader<BufReader<File>>;

impl Outline {
    /// Reads the outline. `None`: the file is not an ONNX model, or cannot be read.
    pub fn read(path: &Path) -> Option<Outline> {
        // Checked before the file is opened: opening a pipe would block.
        let metadata = std::fs::metadata(path).ok()?;
        if !metadata.is_file() || metadata.len() == 0 || metadata.len() > FILE_LIMIT {
            return None;
        }
        let mut reader = Reader::new(BufReader::new(File::open(path).ok()?));
        let outline = Outline { len: metadata.len(), ..Outline::default() };
        let outline = outline.filled(&mut reader).ok()?;
        (outline.graphs == 1).then_some(outline)
    }

    /// Whether the file may need a repair. The operators of the file decide.
    pub fn may_need_repair(&self) -> bool {
        self.ir > NEWEST_IR
            || self.standard() > opset::NEWEST
            || self.ml() > opset::NEWEST_ML
            || self.outputs.iter().any(|output| output.is_list())
            || self.inputs.iter().any(Value::has_texts)
            || (self.ml() > 0 && self.outputs.iter().any(|output| self.is_one_row(output)))
    }

    /// Whether the output has one row, and an input has any number of rows.
    pub fn is_one_row(&self, output: &Value) -> bool {
        output.dims().is_some_and(|dims| dims == [Some(1)])
            && self.inputs.iter().any(|input| input.dims().is_some_and(|dims| dims.first() == Some(&None)))
    }

    /// Whether an output of this name is a list of maps.
    pub fn is_list(&self, name: &str) -> bool {
        self.outputs.iter().any(|output| output.name == name && output.is_list())
    }

    /// The version of the standard's operators; 0 if none is imported.
    pub fn standard(&self) -> i64 {
        self.version(standard_domain)
    }

    /// The version of the operators of classical machine learning; 0 if none is imported.
    pub fn ml(&self) -> i64 {
        self.version(|domain| domain == ML)
    }

    fn version(&self, is: impl Fn(&str) -> bool) -> i64 {
        self.opsets.iter().filter(|(domain, _)| is(domain)).map(|(_, version)| *version).max().unwrap_or(0)
    }

    fn filled<R: BufRead + Seek>(mut self, reader: &mut Reader<R>) -> Result<Outline, WireError> {
        let len = self.len;
        fields(reader, len, |reader, number, value| {
            match (number, value) {
                (1, WireValue::Varint(version)) => self.ir = version.cast_signed(),
                (7, WireValue::Length(len)) => {
                    self.graphs += 1;
                    self.graph(reader, len)?;
                }
                (8, WireValue::Length(len)) => self.opsets.push(opset(reader, len)?),
                _ => {}
            }
            Ok(())
        })?;
        Ok(self)
    }

    fn graph<R: BufRead + Seek>(&mut self, reader: &mut Reader<R>, len: u64) -> Result<(), WireError> {
        fields(reader, len, |reader, number, value| {
            match (number, value) {
                (11, WireValue::Length(len)) => self.inputs.push(read_value(reader, len)?),
                (12, WireValue::Length(len)) => self.outputs.push(read_value(reader, len)?),
                _ => {}
            }
            Ok(())
        })
    }
}

/// Calls `visit` with each field of the message of `len` bytes that is next. Bytes that `visit`
/// does not read are skipped.
pub(crate) fn fields<R: BufRead + Seek>(
    reader: &mut Reader<R>,
    len: u64,
    mut visit: impl FnMut(&mut Reader<R>, u64, WireValue) -> Result<(), WireError>,
) -> Result<(), WireError> {
    let end = reader.position() + len;
    while let Some((number, value)) = reader.field(end)? {
        let start = reader.position();
        visit(reader, number, value)?;
        if let WireValue::Length(len) = value {
            reader.skip_to(start + len)?;
        }
    }
    Ok(())
}

fn opset<R: BufRead + Seek>(reader: &mut Reader<R>, len: u64) -> Result<(String, i64), WireError> {
    let (mut domain, mut version) = (String::new(), 0);
    fields(reader, len, |reader, number, value| {
        match (number, value) {
            (1, WireValue::Length(len)) => domain = reader.string(len)?,
            (2, WireValue::Varint(number)) => version = number.cast_signed(),
            _ => {}
        }
        Ok(())
    })?;
    Ok((domain, version))
}

fn read_value<R: BufRead + Seek>(reader: &mut Reader<R>, len: u64) -> Result<Value, WireError> {
    let at = reader.position();
    Value::decode(&*reader.bytes(len, VALUE_LIMIT)?).map_err(|_| WireError::Invalid(at))
}
