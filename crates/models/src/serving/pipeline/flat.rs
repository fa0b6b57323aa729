//! The steps of an ensemble, with the steps of ensembles within it, as one graph.
//!
//! Example: step 1 of an ensemble is an ensemble of two steps. The deadline is divided among the
//! steps 0, 1.0, 1.1 and 2. Otherwise the ensemble within would have a deadline of its own. Time that
//! step 1.0 saves would then never reach step 2, and no rehearsal could move time between the two.

use std::ops::Range;
use std::sync::Arc;

use downbeat_core::Time;
use downbeat_core::pipeline::{MOST_STEPS, Shape, Shares};
use downbeat_repository::Ensemble;

/// The steps that run a model with a file, of an ensemble and of the ensembles within it.
pub struct FlatSteps<P> {
    /// Which of them waits for which others.
    pub shape: Shape,
    /// By flat step.
    pub leaves: Vec<Leaf<P>>,
    /// By step of the ensemble: its flat steps.
    blocks: Vec<Range<usize>>,
}

/// A flat step. `P` is the model that it runs.
#[derive(Clone)]
pub struct Leaf<P> {
    /// The number of the step. The step 1 of step 0 is `0.1`.
    pub label: String,
    /// The name of the model.
    pub model: String,
    /// The model. An ensemble stays whole if there would be more than [`MOST_STEPS`] flat steps.
    pub part: P,
}

impl<P: Clone> FlatSteps<P> {
    /// The flat steps of an ensemble whose steps run these models. `inner` has the flat steps of each
    /// step that is an ensemble itself.
    pub fn new(ensemble: &Ensemble, parts: &[P], mut inner: Vec<Option<Arc<FlatSteps<P>>>>) -> FlatSteps<P> {
        let size = |inner: &Option<Arc<FlatSteps<P>>>| inner.as_ref().map_or(1, |inner| inner.leaves.len());
        if inner.iter().map(size).fold(0usize, usize::saturating_add) > MOST_STEPS {
            inner.iter_mut().for_each(|inner| *inner = None);
        }
        let mut blocks: Vec<Range<usize>> = Vec::with_capacity(parts.len());
        for inner in &inner {
            let begin = blocks.last().map_or(0, |block| block.end);
            blocks.push(begin..begin + size(inner));
        }
        let lasts: Vec<Vec<usize>> = inner.iter().zip(&blocks).map(|(inner, block)| lasts(inner, block)).collect();
        let (mut after, mut leaves) = (Vec::new(), Vec::new());
        for (step, (inner, block)) in inner.iter().zip(&blocks).enumerate() {
            let before: Vec<usize> =
                ensemble.graph.after(step).iter().flat_map(|first| lasts[*first].clone()).collect();
            let Some(inner) = inner else {
                let (label, model) = (step.to_string(), ensemble.steps[step].model.clone());
                leaves.push(Leaf { label, model, part: parts[step].clone() });
                after.push(before);
                continue;
            };
            for (flat, leaf) in inner.leaves.iter().enumerate() {
                leaves.push(Leaf { label: format!("{step}.{}", leaf.label), ..leaf.clone() });
                let within = &inner.shape.steps()[flat].after;
                let is_first = within.is_empty();
                after.push(if is_first {
                    before.clone()
                } else {
                    within.iter().map(|step| block.start + step).collect()
                });
            }
        }
        let shape = Shape::new(after).expect("steps of graphs without circles form none together");
        FlatSteps { shape, leaves, blocks }
    }

    /// The flat steps of a step, counted from `base`.
    pub fn block(&self, step: usize, base: usize) -> Range<usize> {
        let Range { start, end } = self.blocks[step];
        base + start..base + end
    }

    /// The number of flat steps.
    pub fn len(&self) -> usize {
        self.leaves.len()
    }
}

/// The last flat steps of a step. No other flat step of the block waits for the output of a last one.
fn lasts<P>(inner: &Option<Arc<FlatSteps<P>>>, block: &Range<usize>) -> Vec<usize> {
    let is_last = |flat: &usize| inner.as_ref().is_none_or(|inner| inner.shape.next(*flat - block.start).is_empty());
    block.clone().filter(is_last).collect()
}

/// How a request's time is divided, and where the steps of an ensemble stand in this division.
#[derive(Clone)]
pub struct Plan {
    /// The shares of all steps, of the outermost ensemble.
    pub shares: Arc<Shares>,
    /// The first flat step of this ensemble.
    pub base: usize,
    /// Flat steps outside of this ensemble that are not done either.
    pub beside: Vec<usize>,
    /// When the outermost ensemble must be done.
    pub deadline: Time,
    /// The flat steps of this ensemble.
    pub len: usize,
}

impl Plan {
    /// When a block of flat steps must be done, if a request reaches it now. The block begins with
    /// `firsts`, and `others` are not done.
    pub fn local_deadline<P>(
        &self,
        flat: &FlatSteps<P>,
        block: &Range<usize>,
        (firsts, others): (&[usize], Vec<usize>),
        now: Time,
    ) -> Time {
        let mut unfinished = others;
        unfinished.extend_from_slice(&self.beside);
        if block.len() == 1 {
            return self.shares.local_deadline_beside(block.start, &unfinished, now, self.deadline);
        }
        // The block is done with its last step, after its longest path.
        unfinished.extend_from_slice(firsts);
        let is_last =
            |step: &usize| flat.shape.next(step - self.base).iter().all(|next| !block.contains(&(self.base + next)));
        let ends = block.clone().filter(is_last);
        let ends = ends.map(|last| self.shares.local_deadline_beside(last, &unfinished, now, self.deadline));
        ends.max().unwrap_or(self.deadline)
    }

    /// The flat steps of a block that wait for no other step of the block.
    pub fn firsts<P>(&self, flat: &FlatSteps<P>, block: &Range<usize>) -> Vec<usize> {
        let waits = |step: usize| {
            flat.shape.steps()[step - self.base].after.iter().any(|first| block.contains(&(self.base + first)))
        };
        block.clone().filter(|step| !waits(*step)).collect()
    }

    /// The plan of an ensemble whose flat steps are this block.
    pub fn within(&self, block: &Range<usize>, others: Vec<usize>) -> Plan {
        let mut beside = others;
        beside.extend_from_slice(&self.beside);
        Plan { shares: self.shares.clone(), base: block.start, beside, deadline: self.deadline, len: block.len() }
    }
}
