//! One run: a workload at a load.

use downbeat_core::pipeline::{End, PipelineArrival, StageError};
use downbeat_sim::pipelines::{PipelineJudge, Verdict, at_load};

use crate::rule::Batches;
use crate::workload::PipelineWorkload;

/// A workload at a load, and how many losses are still of interest.
#[derive(Clone, Debug)]
pub struct Run<'a> {
    /// The workload.
    pub workload: &'a PipelineWorkload,
    /// The kind of batches.
    pub batches: Batches,
    /// The load.
    pub load: f64,
    /// The arrivals at this load.
    pub arrivals: Vec<PipelineArrival>,
    /// So many arrivals do not count.
    pub warm_up: usize,
    /// A run that loses more requests is given up.
    pub most_lost: u64,
}

impl<'a> Run<'a> {
    /// A run of which all losses count. The first quarter of the arrivals is the warm-up.
    pub fn new(workload: &'a PipelineWorkload, batches: Batches, load: f64) -> Run<'a> {
        let arrivals = at_load(&workload.arrivals, load);
        let warm_up = arrivals.len() / 4;
        Run { workload, batches, load, arrivals, warm_up, most_lost: u64::MAX }
    }

    /// The run, given up once more than this share of the requests is lost.
    #[must_use]
    pub fn tolerating(self, share: f64) -> Run<'a> {
        let asked = self.arrivals.len().saturating_sub(self.warm_up);
        Run { most_lost: (asked as f64 * share).floor() as u64, ..self }
    }

    /// Judges what `play` plays. `None`: the run was given up.
    pub(crate) fn judge(
        &self,
        play: impl FnOnce(&mut dyn FnMut(&End) -> bool) -> Result<Option<Vec<End>>, StageError>,
    ) -> Option<Verdict> {
        let judge = PipelineJudge::new(&self.arrivals, self.warm_up);
        let mut lost = 0;
        let mut goes_on = |end: &End| {
            lost += u64::from(judge.is_loss(end));
            lost <= self.most_lost
        };
        let ends = play(&mut goes_on).expect("a drawn stage is whole")?;
        Some(judge.judge(&ends).expect("each request ends once"))
    }
}
