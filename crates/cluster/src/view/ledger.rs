//! The last counts of every process of a cluster. The counts of a process that has gone stay in the
//! sums, so that no sum goes back.

use std::collections::{BTreeMap, BTreeSet};

use downbeat_core::{Duration, Time};
use downbeat_protocol::inference::{InferStatistics, ModelStatistics, StatisticDuration};
use downbeat_roles::{NodeId, Role};
use downbeat_service::report::cluster_report::ClusterStatistics;
use downbeat_service::report::live::{DeviceName, LiveModel, LiveProcess, LiveReport, LiveTenant, ProcessState};
use downbeat_service::tenants::OTHERS;

use super::asks::Part;
use crate::node::status::{role_name, shown};

/// How long a process that has gone is listed, and at most so many of them.
const LISTED_FOR: Duration = Duration::from_millis(60_000);
const MOST_GONE: usize = 64;

/// The last counts of every process.
#[derive(Default)]
pub struct Ledger {
    known: BTreeMap<NodeId, Known>,
    /// The counts of frontends that are listed no more, by model and version.
    folded: BTreeMap<Version, LiveModel>,
    folded_statistics: BTreeMap<Version, ModelStatistics>,
    /// The counts of their tenants, by name.
    folded_tenants: BTreeMap<String, LiveTenant>,
}

/// A model's name and version.
type Version = (String, String);

/// The last counts of a process.
struct Known {
    name: String,
    role: Role,
    state: ProcessState,
    heard: Time,
    live: Option<LiveReport>,
    statistics: Option<Vec<ModelStatistics>>,
}

impl Known {
    fn process(&self, node: NodeId) -> LiveProcess {
        let (name, role) = (self.name.clone(), role_name(self.role).into());
        LiveProcess { name, node: shown(node), role, state: self.state }
    }
}

/// The sums of all processes.
pub struct Sums {
    pub models: Vec<LiveModel>,
    pub tenants: Vec<LiveTenant>,
    /// The devices with their busy seconds.
    pub devices: Vec<(DeviceName, f64)>,
    pub processes: Vec<LiveProcess>,
}

impl Ledger {
    /// Takes the live reports of processes. `is_whole`: all connected processes have answered.
    pub fn take_live(&mut self, now: Time, reports: Vec<(Part, LiveReport)>, is_whole: bool) {
        self.take(now, reports, is_whole, |known, report| known.live = Some(report));
    }

    /// Takes the statistics of processes.
    pub fn take_statistics(&mut self, now: Time, reports: Vec<(Part, Vec<ModelStatistics>)>, is_whole: bool) {
        self.take(now, reports, is_whole, |known, models| known.statistics = Some(models));
    }

    fn take<R>(&mut self, now: Time, reports: Vec<(Part, R)>, is_whole: bool, keep: impl Fn(&mut Known, R)) {
        let heard = reports.into_iter().map(|(part, report)| {
            keep(self.hear(now, &part), report);
            part.node
        });
        let heard = heard.collect();
        self.miss(now, &heard, is_whole);
    }

    fn hear(&mut self, now: Time, part: &Part) -> &mut Known {
        let (name, role, state) = (part.name.clone(), part.role, ProcessState::Answers);
        let known = self.known.entry(part.node).or_insert_with(|| {
            let (live, statistics) = Default::default();
            Known { name: String::new(), role, state, heard: now, live, statistics }
        });
        (known.name, known.state, known.heard) = (name, state, now);
        known
    }

    /// Notes the processes that have not answered, and folds those that have gone for long.
    fn miss(&mut self, now: Time, heard: &BTreeSet<NodeId>, is_whole: bool) {
        for (_, known) in self.known.iter_mut().filter(|(node, _)| !heard.contains(node)) {
            known.state = if is_whole { ProcessState::Gone } else { ProcessState::Silent };
        }
        let gone = self.known.iter().filter(|(_, known)| known.state == ProcessState::Gone);
        let mut gone: Vec<(Time, NodeId)> = gone.map(|(node, known)| (known.heard, *node)).collect();
        gone.sort_unstable();
        let too_many = gone.len().saturating_sub(MOST_GONE);
        for (place, (since, node)) in gone.into_iter().enumerate() {
            if (place < too_many || now.since(since) > LISTED_FOR)
                && let Some(known) = self.known.remove(&node)
                && known.role == Role::Frontend
            {
                let LiveReport { models, tenants, .. } = known.live.unwrap_or_else(|| LiveReport::new("", now));
                let models = models.into_iter().map(|model| LiveModel { history: Vec::new(), ..model });
                models.for_each(|model| add_live(&mut self.folded, &model));
                tenants.iter().for_each(|tenant| add_tenant(&mut self.folded_tenants, tenant));
                let models = known.statistics.into_iter().flatten();
                models.for_each(|model| add_statistics(&mut self.folded_statistics, &model));
            }
        }
    }

    /// The sums over all frontends, with the facts that backends know.
    pub fn live(&self) -> Sums {
        let (mut models, mut tenants) = (BTreeMap::new(), BTreeMap::new());
        let reports = |role: Role| {
            let of_role = self.known.values().filter(move |known| known.role == role);
            of_role.filter_map(|known| Some((known, known.live.as_ref()?)))
        };
        for (_, report) in reports(Role::Frontend) {
            for model in &report.models {
                add_live(&mut models, model);
                let sum = models.entry((model.model.clone(), model.version.clone())).or_default();
                (sum.state, sum.slo_ms) = (model.state.clone(), sum.slo_ms.or(model.slo_ms));
                sum.ensemble |= model.ensemble;
                sum.max_batch = sum.max_batch.max(model.max_batch);
            }
            report.tenants.iter().for_each(|tenant| add_tenant(&mut tenants, tenant));
        }
        let mut devices = Vec::new();
        for (known, report) in reports(Role::Backend) {
            let name = |device| DeviceName { backend: known.name.clone(), device };
            devices.extend(report.device_busy_s.iter().enumerate().map(|(device, busy)| (name(device), *busy)));
            if known.state != ProcessState::Answers {
                continue;
            }
            for model in &report.models {
                let sum = models.entry((model.model.clone(), model.version.clone())).or_default();
                sum.take_facts(model);
                if sum.state.is_empty() {
                    (sum.state, sum.reason) = (model.state.clone(), model.reason.clone());
                }
            }
        }
        devices.sort_by(|(a, _), (b, _)| (&a.backend, a.device).cmp(&(&b.backend, b.device)));
        for (version, counts) in &self.folded {
            if let Some(model) = models.get_mut(version) {
                model.add_counts(counts);
            }
        }
        for (name, counts) in &self.folded_tenants {
            if let Some(tenant) = tenants.get_mut(name) {
                tenant.add(counts);
            }
        }
        let named = models.into_iter().map(|((model, version), sums)| LiveModel { model, version, ..sums });
        let others = tenants.remove(OTHERS);
        Sums {
            models: named.collect(),
            tenants: tenants.into_values().chain(others).collect(),
            devices,
            processes: self.processes(|known| known.live.is_some()).map(|(process, _)| process).collect(),
        }
    }

    /// The sums over all frontends, and each process's own counts.
    pub fn statistics(&self) -> ClusterStatistics {
        let mut sums = self.folded_statistics.clone();
        for known in self.known.values().filter(|known| known.role == Role::Frontend) {
            known.statistics.iter().flatten().for_each(|model| add_statistics(&mut sums, model));
        }
        let of = |(process, known): (LiveProcess, &Known)| (process, known.statistics.clone().unwrap_or_default());
        let processes = self.processes(|known| known.statistics.is_some()).map(of).collect();
        ClusterStatistics { models: sums.into_values().collect(), processes }
    }

    fn processes(&self, is_listed: impl Fn(&Known) -> bool) -> impl Iterator<Item = (LiveProcess, &Known)> {
        let mut all: Vec<(LiveProcess, &Known)> = Vec::new();
        all.extend(
            self.known.iter().filter(|(_, known)| is_listed(known)).map(|(node, known)| (known.process(*node), known)),
        );
        all.sort_by(|(a, _), (b, _)| (&a.role, &a.name, &a.node).cmp(&(&b.role, &b.name, &b.node)));
        all.into_iter()
    }
}

fn add_live(sums: &mut BTreeMap<Version, LiveModel>, model: &LiveModel) {
    sums.entry((model.model.clone(), model.version.clone())).or_default().add_counts(model);
}

fn add_tenant(sums: &mut BTreeMap<String, LiveTenant>, tenant: &LiveTenant) {
    match sums.get_mut(&tenant.tenant) {
        Some(sum) => sum.add(tenant),
        None => drop(sums.insert(tenant.tenant.clone(), tenant.clone())),
    }
}

/// Adds the counts of a model on another process.
fn add_statistics(sums: &mut BTreeMap<Version, ModelStatistics>, model: &ModelStatistics) {
    let (name, version) = (model.name.clone(), model.version.clone());
    let sum = sums.entry((name.clone(), version.clone())).or_default();
    (sum.name, sum.version) = (name, version);
    sum.last_inference = sum.last_inference.max(model.last_inference);
    sum.inference_count = sum.inference_count.saturating_add(model.inference_count);
    sum.execution_count = sum.execution_count.saturating_add(model.execution_count);
    let InferStatistics { success, fail, queue, compute_input, compute_infer, compute_output, cache_hit, cache_miss } =
        sum.inference_stats.get_or_insert_default();
    if let Some(more) = &model.inference_stats {
        add_duration(success, more.success.as_ref());
        add_duration(fail, more.fail.as_ref());
        add_duration(queue, more.queue.as_ref());
        add_duration(compute_input, more.compute_input.as_ref());
        add_duration(compute_infer, more.compute_infer.as_ref());
        add_duration(compute_output, more.compute_output.as_ref());
        add_duration(cache_hit, more.cache_hit.as_ref());
        add_duration(cache_miss, more.cache_miss.as_ref());
    }
    for more in &model.batch_stats {
        let place = sum.batch_stats.binary_search_by_key(&more.batch_size, |batch| batch.batch_size);
        match place {
            Ok(place) => {
                let batch = &mut sum.batch_stats[place];
                add_duration(&mut batch.compute_input, more.compute_input.as_ref());
                add_duration(&mut batch.compute_infer, more.compute_infer.as_ref());
                add_duration(&mut batch.compute_output, more.compute_output.as_ref());
            }
            Err(place) => sum.batch_stats.insert(place, *more),
        }
    }
}

fn add_duration(sum: &mut Option<StatisticDuration>, more: Option<&StatisticDuration>) {
    let sum = sum.get_or_insert_default();
    if let Some(more) = more {
        sum.count = sum.count.saturating_add(more.count);
        sum.ns = sum.ns.saturating_add(more.ns);
    }
}

#[cfg(test)]
mod tests {
    use downbeat_protocol::inference::InferBatchStatistics;
    use downbeat_service::report::live::LiveStep;

    use super::*;

    fn at(second: u64) -> Time {
        Time::ZERO + Duration::from_millis(1_000 * second)
    }

    fn part(node: u64, role: Role) -> Part {
        Part { node: NodeId(node), role, name: format!("n{node}"), clock: None, answer: Vec::new() }
    }

    fn report(in_time: u64, busy: &[f64]) -> LiveReport {
        let model = LiveModel { in_time, state: "READY".into(), max_batch: 4, ..LiveModel::default() };
        serde_json::from_value(serde_json::json!({
            "server": "s", "version": "0", "wall_ms": 0, "now_ns": 0, "latency_bounds_ms": [], "batch_bounds": [],
            "models": [LiveModel { model: "m".into(), version: "1".into(), ..model }], "device_busy_s": busy,
            "history_part_s": 10.0, "in_cluster": true,
        }))
        .unwrap()
    }

    fn in_time(ledger: &Ledger) -> u64 {
        ledger.live().models.iter().map(|model| model.in_time).sum()
    }

    fn states(ledger: &Ledger) -> Vec<ProcessState> {
        ledger.live().processes.iter().map(|process| process.state).collect()
    }

    /// Requests count at frontends, also of those that have gone. Devices are the backends'.
    #[test]
    fn sums_do_not_go_back_when_processes_go() {
        let mut ledger = Ledger::default();
        let all = vec![
            (part(1, Role::Frontend), report(10, &[])),
            (part(2, Role::Frontend), report(5, &[])),
            (part(3, Role::Backend), report(99, &[1.5, 0.5])),
        ];
        ledger.take_live(at(1), all, true);
        assert_eq!(in_time(&ledger), 15);
        assert_eq!(ledger.live().devices[1], (DeviceName { backend: "n3".into(), device: 1 }, 0.5));
        let two = || vec![(part(1, Role::Frontend), report(11, &[]))];
        ledger.take_live(at(2), two(), false);
        assert_eq!(
            (in_time(&ledger), &states(&ledger)[..]),
            (16, {
                use ProcessState::{Answers, Silent};
                &[Silent, Answers, Silent][..]
            })
        );
        ledger.take_live(at(3), two(), true);
        assert_eq!(states(&ledger)[0], ProcessState::Gone);
        assert_eq!((in_time(&ledger), ledger.live().devices.len()), (16, 2));
        // After a minute they are listed no more, and the requests still count.
        ledger.take_live(at(70), two(), true);
        assert_eq!((in_time(&ledger), ledger.live().devices.len(), states(&ledger).len()), (16, 0, 1));
    }

    /// A frontend with a tenant and with an ensemble of one step, of which each has done so many requests.
    fn with_parts(done: u64) -> LiveReport {
        let mut report = report(done, &[]);
        let (tenant, model) = (|name: &str| name.to_owned(), "s".to_owned());
        let counts =
            |tenant| LiveTenant { tenant, share: 0.0, quota: None, within: done, beyond: 0, refused: 0, device_s: 0.5 };
        report.tenants = vec![counts(tenant("zoo")), counts(tenant(OTHERS))];
        report.models[0].steps =
            vec![LiveStep { model, share: 1.0, done, waited_s: 0.25, ran_s: 0.5, dropped: 1, failed: 0 }];
        report
    }

    #[test]
    fn tenants_and_steps_add_up_also_of_frontends_that_have_gone() {
        let mut ledger = Ledger::default();
        let all = vec![(part(1, Role::Frontend), with_parts(2)), (part(2, Role::Frontend), with_parts(3))];
        ledger.take_live(at(1), all, true);
        for second in [2, 70] {
            ledger.take_live(at(second), vec![(part(1, Role::Frontend), with_parts(2))], true);
            let Sums { models, tenants, .. } = ledger.live();
            let told: Vec<_> = tenants.iter().map(|its| (&*its.tenant, its.within, its.device_s)).collect();
            assert_eq!(told, [("zoo", 5, 1.0), (OTHERS, 5, 1.0)]);
            let [LiveStep { share, done, waited_s, ran_s, dropped, .. }] = models[0].steps[..] else {
                panic!("a step")
            };
            assert_eq!((share, done, waited_s, ran_s, dropped), (1.0, 5, 0.5, 1.0, 2));
        }
    }

    #[test]
    fn processes_that_went_are_bounded() {
        let mut ledger = Ledger::default();
        for node in 0..200 {
            ledger.take_live(at(1), vec![(part(node, Role::Frontend), report(1, &[]))], true);
        }
        assert_eq!((in_time(&ledger), ledger.known.len()), (200, MOST_GONE + 1));
    }

    #[test]
    fn statistics_add_up_by_model_and_batch_size() {
        let some = |count, ns| Some(StatisticDuration { count, ns });
        let batch = |size| InferBatchStatistics { batch_size: size, compute_infer: some(1, 10), ..Default::default() };
        let of = |count: u64, sizes: &[u64]| ModelStatistics {
            name: "m".into(),
            inference_count: count,
            inference_stats: Some(InferStatistics { success: some(count, 100), ..Default::default() }),
            batch_stats: sizes.iter().copied().map(batch).collect(),
            ..Default::default()
        };
        let mut ledger = Ledger::default();
        let parts = vec![
            (part(1, Role::Frontend), vec![of(3, &[2, 8])]),
            (part(2, Role::Frontend), vec![of(4, &[1, 8])]),
            (part(3, Role::Backend), vec![of(7, &[1])]),
        ];
        ledger.take_statistics(at(1), parts, true);
        let ClusterStatistics { models, processes } = ledger.statistics();
        assert_eq!((models.len(), models[0].inference_count, processes.len()), (1, 7, 3));
        let success = models[0].inference_stats.as_ref().and_then(|stats| stats.success);
        assert_eq!(success.map(|its| (its.count, its.ns)), Some((7, 200)));
        let sizes: Vec<_> = models[0].batch_stats.iter().map(|b| (b.batch_size, b.compute_infer.unwrap().ns)).collect();
        assert_eq!(sizes, [(1, 10), (2, 10), (8, 20)]);
    }
}
