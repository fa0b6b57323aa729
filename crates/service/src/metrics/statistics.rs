//! The work of a model version, as the protocol's statistics report it.

use std::collections::BTreeMap;

use downbeat_core::Duration;
use downbeat_protocol::inference as pb;

/// How often, and for how long in all.
#[derive(Clone, Copy, Default, Debug)]
struct Tally {
    count: u64,
    total: Duration,
}

impl Tally {
    fn add(&mut self, took: Duration) {
        self.count += 1;
        self.total += took;
    }

    fn to_proto(self) -> pb::StatisticDuration {
        pb::StatisticDuration { count: self.count, ns: self.total.as_nanos() }
    }
}

/// The phases of a batch on a device (Triton's names).
#[derive(Clone, Copy, Default, Debug)]
pub struct Phases {
    /// Joining the requests' inputs.
    pub compute_input: Duration,
    /// The engine's run.
    pub compute_infer: Duration,
    /// Separating the outputs.
    pub compute_output: Duration,
}

/// How often each phase, and for how long in all.
#[derive(Clone, Copy, Default, Debug)]
struct PhaseTally {
    compute_input: Tally,
    compute_infer: Tally,
    compute_output: Tally,
}

impl PhaseTally {
    fn add(&mut self, phases: Phases) {
        self.compute_input.add(phases.compute_input);
        self.compute_infer.add(phases.compute_infer);
        self.compute_output.add(phases.compute_output);
    }
}

/// Counts and times of one model version.
#[derive(Clone, Default, Debug)]
pub struct Statistics {
    inferences: u64,
    executions: u64,
    last_inference_ms: u64,
    success: Tally,
    fail: Tally,
    queue: Tally,
    phases: PhaseTally,
    batches: BTreeMap<u32, PhaseTally>,
}

impl Statistics {
    /// Counts one launch of `rows` items for requests that waited `queued` and took `total` each.
    pub fn record_batch(
        &mut self,
        now_ms: u64,
        rows: u32,
        phases: Phases,
        requests: impl Iterator<Item = (Duration, Duration)>,
    ) {
        self.record_launch(rows, phases);
        self.record_requests(now_ms, rows, phases, requests);
    }

    /// Counts one launch of `rows` items, without its requests.
    pub fn record_launch(&mut self, rows: u32, phases: Phases) {
        self.executions += 1;
        self.batches.entry(rows).or_default().add(phases);
    }

    /// Counts requests of `rows` items together, without their launch. The requests waited `queued`
    /// and took `total` each.
    pub fn record_requests(
        &mut self,
        now_ms: u64,
        rows: u32,
        phases: Phases,
        requests: impl Iterator<Item = (Duration, Duration)>,
    ) {
        self.inferences += u64::from(rows);
        self.last_inference_ms = now_ms;
        for (queued, total) in requests {
            self.queue.add(queued);
            self.success.add(total);
            self.phases.add(phases);
        }
    }

    /// Counts a request that got an error `after` its arrival.
    pub fn record_failure(&mut self, after: Duration) {
        self.fail.add(after);
    }

    /// The statistics in the protocol's form.
    pub fn to_proto(&self, name: &str, version: &str) -> pb::ModelStatistics {
        pb::ModelStatistics {
            name: name.to_owned(),
            version: version.to_owned(),
            last_inference: self.last_inference_ms,
            inference_count: self.inferences,
            execution_count: self.executions,
            inference_stats: Some(pb::InferStatistics {
                success: Some(self.success.to_proto()),
                fail: Some(self.fail.to_proto()),
                queue: Some(self.queue.to_proto()),
                compute_input: Some(self.phases.compute_input.to_proto()),
                compute_infer: Some(self.phases.compute_infer.to_proto()),
                compute_output: Some(self.phases.compute_output.to_proto()),
                cache_hit: Some(pb::StatisticDuration::default()),
                cache_miss: Some(pb::StatisticDuration::default()),
            }),
            batch_stats: self
                .batches
                .iter()
                .map(|(rows, tally)| pb::InferBatchStatistics {
                    batch_size: u64::from(*rows),
                    compute_input: Some(tally.compute_input.to_proto()),
                    compute_infer: Some(tally.compute_infer.to_proto()),
                    compute_output: Some(tally.compute_output.to_proto()),
                })
                .collect(),
            ..Default::default()
        }
    }
}
