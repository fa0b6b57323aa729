//! The labels of classifiers: one for each row of the request. LightGBM's converter writes a single
//! row in place of any number.

use std::collections::{BTreeMap, BTreeSet};

use downbeat_engine::onnx::proto::{NodeProto, ValueInfoProto, shaped_type};
use prost::Message;

use crate::outline::ML;

/// Operators whose first output is a label for each row.
const CLASSIFIERS: [&[u8]; 3] = [b"LinearClassifier", b"SVMClassifier", b"TreeEnsembleClassifier"];
/// Operators that keep the shape of their input.
const SAME: [&[u8]; 2] = [b"Identity", b"Cast"];
/// The most operators between a classifier and its output.
const HOPS: usize = 8;

/// The values of a graph that are labels of a classifier.
#[derive(Debug, Default)]
pub(crate) struct Labels {
    made: BTreeSet<String>,
    from: BTreeMap<String, String>,
}

impl Labels {
    /// Whether an operator of this kind matters.
    pub fn concern(op_type: &[u8]) -> bool {
        CLASSIFIERS.contains(&op_type) || SAME.contains(&op_type)
    }

    /// Notes an operator.
    pub fn see(&mut self, node: &NodeProto) {
        let Some(output) = node.output.first() else { return };
        if node.domain == ML {
            self.made.insert(output.clone());
        } else if let Some(input) = node.input.first() {
            self.from.insert(output.clone(), input.clone());
        }
    }

    /// Whether an output is the labels of a classifier.
    pub fn has(&self, output: &str) -> bool {
        let mut value = output;
        for _ in 0..HOPS {
            match self.from.get(value) {
                Some(input) => value = input,
                None => break,
            }
        }
        self.made.contains(value)
    }
}

/// The output with any number of rows.
pub(crate) fn output(name: &str, element: i32) -> Vec<u8> {
    let r#type = Some(shaped_type(element, &[-1]).encode_to_vec().into());
    ValueInfoProto { name: name.to_owned(), r#type }.encode_to_vec()
}
