//! An operator with the flows and sizes of its inputs and outputs, the input of rules.

use std::cell::Cell;
use std::rc::Rc;

use super::cause::Cause;
use super::flow::{BATCHES, Flow, Place, RUNS, TYPICAL};
use crate::onnx::proto::NodeProto;
use crate::onnx::sizes::{Extent, Known, Step, axis};

/// The flow of each output of an operator. An error is the flow of all outputs: mixed or unknown.
pub(super) type Ruled = Result<Vec<Flow>, Flow>;

/// An operator in a graph.
pub(super) struct Op<'a> {
    pub node: &'a NodeProto,
    pub step: &'a Step,
    /// The version of the operators in this domain; 0 if the model gives none.
    pub opset: i64,
    /// The flow of each input; `None` for an input that is left out.
    pub flows: &'a [Option<Flow>],
    /// The facts for its size rule, by run.
    pub known: &'a [Known<'a>],
    /// The results of its size rule, by run and output.
    pub made: &'a [Vec<Extent>],
    /// Set if sizes do not fit each other: the model does not take the sizes that were tried.
    pub misfit: &'a Cell<bool>,
}

impl<'a> Op<'a> {
    pub fn cause(&self, reason: impl Into<String>) -> Rc<Cause> {
        let first = self.node.output.iter().find(|name| !name.is_empty());
        let name = if self.node.name.is_empty() { first.cloned().unwrap_or_default() } else { self.node.name.clone() };
        Rc::new(Cause { operator: self.node.op_type.clone(), node: name, reason: reason.into() })
    }

    pub fn mixed(&self, reason: impl Into<String>) -> Flow {
        Flow::Mixed(self.cause(reason))
    }

    pub fn unknown(&self, reason: impl Into<String>) -> Flow {
        Flow::Unknown(self.cause(reason))
    }

    /// The flow if the sizes of an input or output are unknown.
    pub fn without_sizes(&self) -> Flow {
        self.unknown("its sizes cannot be worked out from the sizes of the inputs")
    }

    /// The same flow for every output.
    pub fn all(&self, flow: Flow) -> Vec<Flow> {
        vec![flow; self.node.output.len()]
    }

    pub fn all_rows(&self, place: Place) -> Ruled {
        Ok(self.all(Flow::Rows(place)))
    }

    pub fn flow(&self, index: usize) -> &Flow {
        self.flows.get(index).and_then(Option::as_ref).unwrap_or(&Flow::Free)
    }

    /// The place of the rows in an input; `None` if it has no rows.
    pub fn place(&self, index: usize) -> Option<Place> {
        match self.flow(index) {
            Flow::Rows(place) => Some(*place),
            _ => None,
        }
    }

    pub fn has(&self, index: usize) -> bool {
        self.flows.get(index).is_some_and(Option::is_some)
    }

    pub fn count(&self) -> usize {
        self.flows.len()
    }

    /// The sizes of an input in a run.
    pub fn dims(&self, index: usize, run: usize) -> Result<&'a [u64], Flow> {
        let known: Option<&'a Known<'a>> = self.known.get(run);
        known.and_then(|known| known.dims(index)).ok_or_else(|| self.without_sizes())
    }

    /// The sizes of an output in a run.
    pub fn made(&self, output: usize, run: usize) -> Result<&'a [u64], Flow> {
        let extent: Option<&'a Extent> = self.made.get(run).and_then(|made| made.get(output));
        extent.and_then(|extent| extent.dims.as_deref()).ok_or_else(|| self.without_sizes())
    }

    /// The number of axes of an input.
    pub fn rank(&self, index: usize) -> Result<usize, Flow> {
        Ok(self.dims(index, TYPICAL)?.len())
    }

    /// Whether the elements of an input are known in every run: then only sizes decide them.
    pub fn is_counted(&self, index: usize) -> bool {
        self.known.iter().all(|known| known.get(index).is_some_and(|extent| extent.data.is_some()))
    }

    /// Whether an output's elements are known, and the same, in every run. `None` if they are not
    /// known.
    pub fn made_alike(&self, output: usize) -> Option<bool> {
        let data = |run: usize| self.made.get(run)?.get(output)?.data.as_deref();
        let first = data(0)?;
        (1..RUNS).map(|run| data(run).map(|data| data == first)).try_fold(true, |all, same| Some(all && same?))
    }

    /// The numbers of an input, or of an attribute as in older operators, if they are the same in
    /// every run. `None` if both are left out.
    pub fn numbers(&self, index: usize, attribute: &str) -> Result<Option<Vec<f64>>, Flow> {
        let unknown = || self.unknown(format!("its {attribute} depend on values or on the batch"));
        let mut each = self.known.iter().map(|known| known.optional(index, attribute).ok_or_else(unknown));
        let first = each.next().ok_or_else(unknown)??;
        for other in each {
            if other? != first {
                return Err(unknown());
            }
        }
        Ok(first)
    }

    /// The numbers of an input or an attribute in a run.
    pub fn numbers_in(&self, index: usize, attribute: &str, run: usize) -> Result<Option<Vec<f64>>, Flow> {
        let known = self.known.get(run).and_then(|known| known.optional(index, attribute));
        known.ok_or_else(|| self.unknown(format!("its {attribute} depend on values")))
    }

    pub fn int(&self, name: &str, default: i64) -> i64 {
        self.known.first().map_or(default, |known| known.int(name, default))
    }

    pub fn string(&self, name: &str) -> String {
        let attribute = self.step.attributes.iter().find(|attribute| attribute.name == name);
        let bytes = attribute.and_then(|attribute| attribute.s.clone()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The axis of an input that an attribute names.
    pub fn axis(&self, default: i64, rank: usize) -> Result<usize, Flow> {
        self.axis_of(self.int("axis", default) as f64, rank)
    }

    pub fn axis_of(&self, number: f64, rank: usize) -> Result<usize, Flow> {
        axis(number, rank).ok_or_else(|| self.unknown(format!("it has no axis {number}")))
    }

    /// The mixed flow of a value that is computed along the rows' axis.
    pub fn along(&self, does: &str, place: Place) -> Flow {
        self.mixed(format!("it {does} along axis {}, along which requests are joined", place.axis))
    }

    /// The flow, if the sizes of the output confirm it in every run.
    pub fn settled(&self, output: usize, flow: Flow) -> Flow {
        let sizes = |run: usize| self.made.get(run)?.get(output)?.dims.as_deref();
        let Some(typical) = sizes(TYPICAL) else { return flow };
        let fits = |run: usize| {
            let Some(dims) = sizes(run) else { return false };
            match flow {
                Flow::Free => dims == typical,
                Flow::Rows(place) => {
                    let rest = || dims.iter().zip(typical).enumerate().all(|(i, (a, b))| i == place.axis || a == b);
                    let rows = BATCHES.get(run).and_then(|rows| place.size(*rows));
                    dims.len() == typical.len() && rest() && dims.get(place.axis).copied() == rows
                }
                _ => true,
            }
        };
        if (0..RUNS).all(fits) {
            return flow;
        }
        self.unknown(format!("the sizes of its output {output} do not follow the number of requests"))
    }
}
