//! Plans the repaired file: walks the operators of a file, and replaces the parts that engines
//! refuse.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use downbeat_engine::onnx::message::{self, Field, edited, put_integer};
use downbeat_engine::onnx::proto::{NodeProto, OperatorSetProto};
use downbeat_engine::onnx::standard_domain;
use downbeat_engine::onnx::wire::{Reader, WireError, WireValue};
use prost::Message;

use crate::classifier::{self, Labels};
use crate::outline::{FileReader, ML, Outline};
use crate::pieces::Pieces;
use crate::{KNOWN_IR, NEWEST_IR, REPAIRED_IR, Repair, opset, texts, zip_map};

/// The deepest nesting of graphs in attributes that is followed; files are checked for the same
/// bound.
const DEPTH_LIMIT: u32 = 16;
/// The largest operator that is read, with its constants.
const NODE_LIMIT: u64 = 1 << 28;
/// A version of the standard's operators that has `Identity`, for files that import none.
const WITH_IDENTITY: i64 = 13;

/// The fields that version [`KNOWN_IR`] of the format has.
const MODEL_FIELDS: &[u64] = &[1, 2, 3, 4, 5, 6, 7, 8, 14, 20, 25, 26];
const GRAPH_FIELDS: &[u64] = &[1, 2, 5, 10, 11, 12, 13, 14, 15, 16];
const NODE_FIELDS: &[u64] = &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
const ATTRIBUTE_FIELDS: &[u64] = &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 20, 21, 22, 23];

/// The reason why no repair is planned.
enum Fault {
    /// The file is broken, which its engine reports.
    Broken,
    /// A repair would not be exact. In words, with a remedy.
    Refused(String),
}

impl From<WireError> for Fault {
    fn from(_: WireError) -> Self {
        Fault::Broken
    }
}

impl From<String> for Fault {
    fn from(reason: String) -> Self {
        Fault::Refused(reason)
    }
}

/// Plans the repair of a file.
pub(crate) struct Editor<'a> {
    path: &'a Path,
    outline: &'a Outline,
    /// The newest version of the standard's operators in the file.
    from: i64,
    /// The kinds of operators that have changed for an older version.
    changed: BTreeSet<String>,
    /// The classes of outputs that a `ZipMap` made.
    zipped: BTreeMap<String, Vec<String>>,
    /// Outputs that are lists of maps and that an operator reads.
    read: BTreeSet<String>,
    labels: Labels,
    /// Outputs that have got any number of rows.
    widened: BTreeSet<String>,
    /// Whether the locale of an operator was set.
    sets_locale: bool,
}

impl<'a> Editor<'a> {
    /// Prepares the repair of the file with this outline.
    pub fn new(path: &'a Path, outline: &'a Outline) -> Self {
        Editor {
            path,
            outline,
            from: outline.standard(),
            changed: BTreeSet::new(),
            zipped: BTreeMap::new(),
            read: BTreeSet::new(),
            labels: Labels::default(),
            widened: BTreeSet::new(),
            sets_locale: false,
        }
    }

    /// Plans the repair. `None`: there is nothing to repair.
    ///
    /// # Errors
    /// In words, if a repair would not be exact.
    pub fn run(mut self) -> Result<Option<Repair>, String> {
        self.check_versions()?;
        match self.planned() {
            Ok(pieces) => {
                let done = self.done();
                let repair = Repair { path: self.path.to_owned(), pieces, done, labels: self.zipped };
                Ok((!repair.done.is_empty()).then_some(repair))
            }
            Err(Fault::Broken) => Ok(None),
            Err(Fault::Refused(reason)) => Err(reason),
        }
    }

    /// Refuses operator sets that this crate does not know.
    fn check_versions(&self) -> Result<(), String> {
        let sets = [("ONNX", self.outline.standard(), opset::KNOWN), (ML, self.outline.ml(), opset::NEWEST_ML)];
        match sets.into_iter().find(|(_, version, known)| version > known) {
            None => Ok(()),
            Some((set, version, known)) => Err(format!(
                "it is made for version {version} of the {set} operators, the newest known here is {known}. Export it with an older \
                 version, for example opset_version=20 or target_opset=20"
            )),
        }
    }

    /// The repairs, one sentence each.
    fn done(&self) -> Vec<String> {
        let mut done = Vec::new();
        if self.outline.ir > NEWEST_IR {
            done.push(format!("it has version {REPAIRED_IR} of the format in place of {}", self.outline.ir));
        }
        if self.from > opset::NEWEST {
            let changed: Vec<&str> = self.changed.iter().map(String::as_str).collect();
            let changed = match &*changed {
                [] => "which has the same operators".to_owned(),
                kinds => format!("without attributes of {} that change no answer", kinds.join(", ")),
            };
            let (to, from) = (opset::NEWEST, self.from);
            done.push(format!("it has version {to} of the operators in place of {from}, {changed}"));
        }
        for (output, classes) in &self.zipped {
            done.push(format!(
                "output '{output}' is a tensor of {} scores with labels in place of a list of maps (ZipMap)",
                classes.len()
            ));
        }
        for output in &self.widened {
            done.push(format!("output '{output}' has a label for each row of a request in place of one label"));
        }
        if self.sets_locale {
            done.push("StringNormalizer has the locale C.UTF-8 in place of en_US, with the same letters".to_owned());
        }
        done
    }

    fn planned(&mut self) -> Result<Pieces, Fault> {
        let file = File::open(self.path).map_err(|_| Fault::Broken)?;
        let mut reader = Reader::new(BufReader::new(file));
        let mut pieces = Pieces::default();
        loop {
            let from = reader.position();
            let Some((number, value)) = reader.field(self.outline.len)? else { break };
            let start = reader.position();
            let len = if let WireValue::Length(len) = value { len } else { 0 };
            self.known("model", MODEL_FIELDS, number)?;
            match (number, value) {
                (1, _) if self.outline.ir > NEWEST_IR => {
                    let mut bytes = Vec::new();
                    put_integer(&mut bytes, 1, REPAIRED_IR);
                    pieces.add(&bytes);
                }
                (7, WireValue::Length(len)) => {
                    let graph = self.top_graph(&mut reader, len)?;
                    pieces.message(7, graph);
                }
                (8 | 25, WireValue::Length(len)) => {
                    let bytes = limited(&mut reader, len)?;
                    let made = if number == 8 { self.import(&bytes)? } else { self.function(&bytes)? };
                    pieces.field(number, &made.unwrap_or(bytes));
                }
                _ => pieces.keep(from..start + len),
            }
            reader.skip_to(start + len)?;
        }
        if !self.zipped.is_empty() && !self.outline.opsets.iter().any(|(domain, _)| standard_domain(domain)) {
            let set = OperatorSetProto { domain: String::new(), version: WITH_IDENTITY };
            pieces.field(8, &set.encode_to_vec());
        }
        Ok(pieces)
    }

    /// The top graph, of `len` bytes.
    fn top_graph(&mut self, reader: &mut FileReader, len: u64) -> Result<Pieces, Fault> {
        let end = reader.position() + len;
        // An output may stand before the operator that makes it, so outputs come last.
        let (mut pieces, mut outputs) = (Pieces::default(), Vec::new());
        loop {
            let from = reader.position();
            let Some((number, value)) = reader.field(end)? else { break };
            let start = reader.position();
            let len = if let WireValue::Length(len) = value { len } else { 0 };
            self.known("graph", GRAPH_FIELDS, number)?;
            match (number, value) {
                (1, WireValue::Length(len)) => {
                    let bytes = limited(reader, len)?;
                    match self.node(&bytes, self.outline.standard(), 0)? {
                        None => pieces.keep(from..start + len),
                        Some(node) => pieces.field(1, &node),
                    }
                }
                (12, WireValue::Length(len)) => outputs.push(from..start + len),
                _ => pieces.keep(from..start + len),
            }
            reader.skip_to(start + len)?;
        }
        self.check_readers()?;
        for (range, value) in outputs.into_iter().zip(&self.outline.outputs) {
            let made = match self.zipped.get(&value.name) {
                Some(classes) => zip_map::output(&value.name, value.map_value().unwrap_or(0), classes.len()),
                None if self.outline.is_one_row(value) && self.labels.has(&value.name) => {
                    self.widened.insert(value.name.clone());
                    classifier::output(&value.name, value.element().unwrap_or(0))
                }
                None => {
                    pieces.keep(range);
                    continue;
                }
            };
            pieces.field(12, &made);
        }
        Ok(pieces)
    }

    /// An operator reads the list of maps that would become a tensor.
    fn check_readers(&self) -> Result<(), Fault> {
        match self.read.iter().find(|name| self.zipped.contains_key(*name)) {
            None => Ok(()),
            Some(name) => Err(Fault::Refused(format!(
                "output '{name}' is a list of maps, and another operator reads the list. Export it with the option zipmap=False"
            ))),
        }
    }

    /// A new operator set in place of one of the file.
    fn import(&self, bytes: &[u8]) -> Result<Option<Vec<u8>>, Fault> {
        let set = OperatorSetProto::decode(bytes).map_err(|_| Fault::Broken)?;
        let is_newer = standard_domain(&set.domain) && set.version > opset::NEWEST;
        Ok(is_newer.then(|| OperatorSetProto { version: opset::NEWEST, ..set }.encode_to_vec()))
    }

    /// A function of the model, which imports operator sets of its own.
    fn function(&mut self, bytes: &[u8]) -> Result<Option<Vec<u8>>, Fault> {
        let mut version = 0;
        for field in message::fields(bytes)?.iter().filter(|field| field.number == 9) {
            let set = OperatorSetProto::decode(field.content).map_err(|_| Fault::Broken)?;
            if standard_domain(&set.domain) {
                version = version.max(set.version);
            }
        }
        if version > opset::KNOWN {
            return Err(Fault::Refused(format!(
                "a function of it is made for version {version} of the ONNX operators, the newest known here is {}. Export it with an \
                 older version, for example opset_version=20",
                opset::KNOWN
            )));
        }
        self.from = self.from.max(version);
        edited(bytes, |field| match field.number {
            7 => self.node(field.content, version, 0),
            9 => self.import(field.content),
            _ => Ok(None),
        })
    }

    /// An operator of version `version`, and the graphs inside.
    fn node(&mut self, bytes: &[u8], version: i64, depth: u32) -> Result<Option<Vec<u8>>, Fault> {
        let (mut op_type, mut domain) = (&[][..], &[][..]);
        for field in message::fields(bytes)? {
            self.known("operator", NODE_FIELDS, field.number)?;
            match field.number {
                1 => {
                    let list =
                        self.outline.outputs.iter().find(|it| it.name.as_bytes() == field.content && it.is_list());
                    self.read.extend(list.map(|list| list.name.clone()));
                }
                4 => op_type = field.content,
                7 => domain = field.content,
                _ => {}
            }
        }
        let is_standard = std::str::from_utf8(domain).is_ok_and(standard_domain);
        let decoded = || NodeProto::decode(bytes).map_err(|_| Fault::Broken);
        if op_type == b"ZipMap" && depth == 0 {
            let node = decoded()?;
            let made = node.output.first().filter(|output| self.outline.is_list(output));
            if let Some(output) = made.filter(|_| zip_map::is(&node)) {
                self.zipped.insert(output.clone(), zip_map::classes(&node)?);
                return Ok(Some(zip_map::identity(&node).encode_to_vec()));
            }
        }
        if depth == 0 && Labels::concern(op_type) {
            self.labels.see(&decoded()?);
        }
        if is_standard && op_type == b"StringNormalizer" {
            let mut node = decoded()?;
            if texts::set_locale(&mut node) {
                self.sets_locale = true;
                return Ok(Some(node.encode_to_vec()));
            }
        }
        if is_standard && version > opset::NEWEST && opset::changes(op_type) {
            let mut node = decoded()?;
            if opset::lower(&mut node, version)? {
                self.changed.insert(node.op_type.clone());
                return Ok(Some(node.encode_to_vec()));
            }
        }
        edited(bytes, |field| if field.number == 5 { self.attribute(field, version, depth) } else { Ok(None) })
    }

    fn attribute(&mut self, attribute: &Field<'_>, version: i64, depth: u32) -> Result<Option<Vec<u8>>, Fault> {
        edited(attribute.content, |field| {
            self.known("attribute", ATTRIBUTE_FIELDS, field.number)?;
            if matches!(field.number, 6 | 11) { self.inner_graph(field.content, version, depth + 1) } else { Ok(None) }
        })
    }

    /// A graph in an attribute (`If`, `Loop`, `Scan`).
    fn inner_graph(&mut self, bytes: &[u8], version: i64, depth: u32) -> Result<Option<Vec<u8>>, Fault> {
        if depth > DEPTH_LIMIT {
            return Err(Fault::Broken);
        }
        edited(bytes, |field| {
            self.known("graph", GRAPH_FIELDS, field.number)?;
            if field.number == 1 { self.node(field.content, version, depth) } else { Ok(None) }
        })
    }

    /// Refuses a field that this crate does not know, if the file's version of the format may have
    /// given it a meaning.
    fn known(&self, what: &str, fields: &[u64], number: u64) -> Result<(), Fault> {
        if self.outline.ir <= KNOWN_IR || fields.contains(&number) {
            return Ok(());
        }
        Err(Fault::Refused(format!(
            "it has version {} of the format, and its {what} uses a part that version {KNOWN_IR} lacks. Save it with an older version: \
             model.ir_version = {REPAIRED_IR}; onnx.save(model, path)",
            self.outline.ir
        )))
    }
}

/// The bytes of a message, if there are not too many.
fn limited(reader: &mut FileReader, len: u64) -> Result<Vec<u8>, Fault> {
    if len > NODE_LIMIT {
        return Err(Fault::Refused(format!(
            "an operator of it takes {len} bytes, which is too much for a repair ({NODE_LIMIT}). Keep its constants as initializers: \
             onnx.save(model, path, save_as_external_data=True, convert_attribute=True)"
        )));
    }
    Ok(reader.bytes(len, NODE_LIMIT)?)
}
