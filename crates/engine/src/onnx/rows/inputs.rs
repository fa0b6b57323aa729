//! The declared inputs of a model, and sizes to try them with.

use std::collections::BTreeMap;

use prost::Message;

use super::flow::{BATCHES, Flow, Place};
use super::walk::Value;
use crate::onnx::proto::{TypeProto, ValueInfoProto};
use crate::onnx::sizes::Extent;

/// The sizes to try for all dimensions that vary beside the batch. For size 1 graphs leave an axis
/// out. The number 64 is a length of texts and a size of pictures, 224 another size, and 16,000 a
/// second of audio.
const ALIKE: [u64; 4] = [1, 64, 224, 16_000];
/// In the last try each dimension has a size of its own: multiples of the first number, above the
/// second.
const APART: (u64, u64) = (32, 64);

/// A dimension as declared in the file.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Dim {
    Fixed(i64),
    /// The dimension varies, and may have a name.
    Open(Option<String>),
}

/// An input or output as declared in the file.
#[derive(Clone, Debug)]
pub(super) struct Declaration {
    pub name: String,
    pub element: i32,
    /// `None` if the file has no sizes.
    pub dims: Option<Vec<Dim>>,
}

impl Declaration {
    pub fn of(info: &ValueInfoProto) -> Declaration {
        let kind =
            info.r#type.clone().and_then(|bytes| TypeProto::decode(bytes).ok()).and_then(|kind| kind.tensor_type);
        let element = kind.as_ref().map_or(1, |tensor| tensor.elem_type);
        let dims = kind.and_then(|tensor| tensor.shape).map(|shape| {
            let dim = |dim: crate::onnx::proto::DimensionProto| match dim.dim_value {
                Some(size) if size >= 0 => Dim::Fixed(size),
                _ => Dim::Open(dim.dim_param.filter(|name| !name.is_empty())),
            };
            shape.dim.into_iter().map(dim).collect()
        });
        Declaration { name: info.name.clone(), element, dims }
    }

    pub fn first(&self) -> Option<&Dim> {
        self.dims.as_ref()?.first()
    }

    /// The name of the first dimension.
    pub fn first_name(&self) -> Option<&str> {
        match self.first()? {
            Dim::Open(name) => name.as_deref(),
            Dim::Fixed(_) => None,
        }
    }

    /// The dimensions behind the first.
    pub fn rest(&self) -> impl Iterator<Item = &Dim> {
        self.dims.iter().flatten().skip(1)
    }
}

/// The number of ways to choose sizes for these inputs.
pub(super) fn draws(inputs: &[Declaration]) -> usize {
    let varies = inputs.iter().flat_map(Declaration::rest).any(|dim| matches!(dim, Dim::Open(_)));
    if varies { ALIKE.len() + 1 } else { 1 }
}

/// The inputs with the rows on their first axes. `draw` is one of the ways to choose the other
/// sizes.
pub(super) fn values(inputs: &[Declaration], draw: usize) -> Vec<Value> {
    let mut named = BTreeMap::<String, u64>::new();
    let mut seen = 0;
    let mut size = |dim: &Dim| match dim {
        Dim::Fixed(size) => u64::try_from(*size).unwrap_or(0),
        Dim::Open(name) => match ALIKE.get(draw) {
            Some(size) => *size,
            None => {
                seen += 1;
                let next = APART.1 + APART.0 * seen;
                name.clone().map_or(next, |name| *named.entry(name).or_insert(next))
            }
        },
    };
    let value = |input: &Declaration| {
        let rest: Vec<u64> = input.rest().map(&mut size).collect();
        let run = |rows: &u64| Some(Extent::new(input.element, std::iter::once(*rows).chain(rest.iter().copied())));
        Value { flow: Flow::Rows(Place::plain(0)), runs: BATCHES.iter().map(run).collect() }
    };
    inputs.iter().map(value).collect()
}
