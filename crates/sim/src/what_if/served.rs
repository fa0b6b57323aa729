//! The last requests of a running server, to replay under other settings.

use std::collections::BTreeMap;
use std::sync::Arc;

use downbeat_core::cluster::{ModelOptions, NetworkBudget, OrderPolicy, PastArrival};
use downbeat_core::journal::QueueName;
use downbeat_core::{DeviceKind, Duration, ModelId, Time};

use super::comparison::{Comparison, Row};
use super::figures::{Figures, ModelFigures, Samples, median};
use super::recorded::{BadLog, Recorded, RecordedModel};
use super::setting::{BadSetting, Found, Setting};
use crate::arrivals::arrival::Arrival;
use crate::scenario::MOST_DEVICES;

/// A queue of a running server's scheduler.
#[derive(Clone, Debug)]
pub struct ServedQueue {
    /// The name of the queue's model.
    pub model: String,
    /// The options, with the present profiles.
    pub options: ModelOptions,
    /// Times of the last executions, as shares of the profile's times.
    pub runs: Vec<f64>,
}

/// The queues and the devices of a running server.
#[derive(Clone, Debug)]
pub struct Served {
    /// The queues of the scheduler.
    pub queues: BTreeMap<ModelId, ServedQueue>,
    /// The devices of each kind.
    pub devices: Vec<u32>,
    /// The order in which candidates get devices.
    pub order: OrderPolicy,
    /// How long before its last moment a batch that waits starts.
    pub wake_margin: Duration,
}

impl Served {
    /// The last requests of the server, in the order of their times, for replays. Requests of
    /// unknown queues are left out.
    ///
    /// # Errors
    /// If there are no requests, or the devices are none, too many, or of several kinds.
    pub fn recorded(&self, arrivals: &[PastArrival]) -> Result<Recorded, BadLog> {
        let known = |arrival: &&PastArrival| self.queues.contains_key(&arrival.model);
        let arrivals: Vec<&PastArrival> = arrivals.iter().filter(known).collect();
        let (Some(first), Some(last)) = (arrivals.first(), arrivals.last()) else {
            return Err(BadLog::NoRequests(false));
        };
        let (begin, span) = (first.at, last.at.since(first.at).max(Duration::from_millis(1)));
        let (kind, devices) = self.devices()?;
        let mut budgets: BTreeMap<ModelId, Vec<Duration>> = BTreeMap::new();
        for arrival in &arrivals {
            let budgets = budgets.entry(arrival.model).or_default();
            budgets.extend((arrival.budget < Duration::MAX).then_some(arrival.budget));
        }
        let places: BTreeMap<ModelId, u32> = budgets.keys().copied().zip(0..).collect();
        let mut counts: BTreeMap<ModelId, u64> = BTreeMap::new();
        arrivals.iter().for_each(|arrival| *counts.entry(arrival.model).or_default() += 1);
        let models: Vec<RecordedModel> =
            budgets.into_iter().filter_map(|(id, budgets)| self.model(id, kind, budgets, &places)).collect();
        let arrival = |arrival: &&PastArrival| {
            let at = Time::ZERO + arrival.at.since(begin);
            Arrival {
                at,
                model: ModelId(places.get(&arrival.model).copied().unwrap_or_default()),
                deadline: if arrival.budget == Duration::MAX { Time::MAX } else { at + arrival.budget },
                queue_expiry: Time::MAX,
                level: arrival.level,
                size: arrival.size,
            }
        };
        let figures = models.iter().map(|model| {
            let requests = counts.get(&model.id).copied().unwrap_or_default();
            ModelFigures { model: model.name(), figures: Figures { requests, unknown: requests, ..Figures::default() } }
        });
        let figures: Vec<ModelFigures> = figures.collect();
        let happened = Row {
            source: "server".to_owned(),
            policy: "as served".to_owned(),
            devices,
            rate: 1.0,
            max_batch: None,
            busy: 0.0,
            all: Figures::sum(figures.iter().map(|model| &model.figures)).finished(span, &Samples::default()),
            models: figures,
        };
        Ok(Recorded {
            models,
            arrivals: arrivals.iter().map(arrival).collect(),
            devices,
            network: NetworkBudget::default(),
            order: self.order,
            wake_margin: self.wake_margin,
            span,
            happened,
            notes: Vec::new(),
        })
    }

    fn devices(&self) -> Result<(DeviceKind, u32), BadLog> {
        let mut kinds = (0..).map(DeviceKind).zip(self.devices.iter().copied()).filter(|(_, count)| *count > 0);
        match (kinds.next(), kinds.count()) {
            (None, _) => Err(BadLog::NoDevices),
            (Some((_, count)), _) if count > MOST_DEVICES => Err(BadLog::TooManyDevices(count.into())),
            (Some(only), 0) => Ok(only),
            (Some(_), others) => Err(BadLog::Kinds(others + 1)),
        }
    }

    fn model(
        &self,
        id: ModelId,
        kind: DeviceKind,
        budgets: Vec<Duration>,
        places: &BTreeMap<ModelId, u32>,
    ) -> Option<RecordedModel> {
        let ServedQueue { model, options, runs } = self.queues.get(&id)?;
        let mut options = options.clone();
        options.profiles = options.profiles.get(kind).unwrap_or_else(|| options.profiles.first()).clone().into();
        options.shares_limit = options.shares_limit.and_then(|other| places.get(&other).copied()).map(ModelId);
        let mut executions: Vec<f64> = runs.iter().copied().filter(|share| share.is_finite() && *share > 0.0).collect();
        executions.sort_unstable_by(f64::total_cmp);
        let queue = Some(QueueName { model: model.clone(), ..QueueName::default() });
        Some(RecordedModel { id, queue, options, slo: median(budgets), executions: Arc::from(executions) })
    }
}

impl Recorded {
    /// The outcome at each of these `rates`, as multiples of the recorded rate, in their order. Before
    /// each run but the first, `goes_on` tells whether another run may begin; the rates that were not
    /// run are left out.
    ///
    /// The present load has the settings that the server's rehearsal has found. At another load the
    /// rehearsal would find out whether they still serve it. Therefore the curve takes the better of
    /// two outcomes: that of these settings, and that of the rule for the load of the moment.
    ///
    /// # Errors
    /// If the setting or a rate is invalid.
    pub fn curve(
        &self,
        setting: &Setting,
        rates: &[f64],
        goes_on: impl Fn() -> bool + Sync,
    ) -> Result<Vec<Row>, BadSetting> {
        let runs = |rate: &f64| {
            let setting = Setting { rate: *rate, ..setting.clone() };
            let by_rule =
                (!self.has_found_all(&setting)).then(|| Setting { found: Found::default(), ..setting.clone() });
            std::iter::once(setting).chain(by_rule)
        };
        let settings: Vec<Setting> = rates.iter().flat_map(runs).collect();
        let comparison = Comparison::of(self, &settings, 1, |_| goes_on())?;
        let mut rows: Vec<Row> = Vec::new();
        for row in comparison.rows.into_iter().skip(1) {
            match rows.last_mut().filter(|last| last.rate == row.rate) {
                Some(last) if row.all.attainment > last.all.attainment => *last = row,
                Some(_) => {}
                None => rows.push(row),
            }
        }
        Ok(rows)
    }

    /// Whether a rehearsal has found nothing, or has found its settings for the very load and devices
    /// of this setting.
    fn has_found_all(&self, setting: &Setting) -> bool {
        let is_present = setting.rate == 1.0 && setting.slo_factor == 1.0 && setting.devices == self.devices;
        is_present || setting.policy.is_some() || setting.found == Found::default()
    }
}

#[cfg(test)]
mod tests {
    use downbeat_core::LatencyProfile;
    use downbeat_core::cluster::{DispatchPolicy, DropPolicy};

    use super::*;

    /// A device answers a request in 10 ms, and two in 11 ms; 50 requests/s come.
    fn served() -> (Served, Vec<PastArrival>) {
        let profile = LatencyProfile::linear_ms(1.0, 9.0, 8).unwrap();
        let options = ModelOptions::new(profile, DispatchPolicy::Eager, DropPolicy::HeadDrop);
        let queue = ServedQueue { model: "resnet".to_owned(), options, runs: Vec::new() };
        let (order, wake_margin) = (OrderPolicy::default(), Duration::ZERO);
        let served = Served { queues: [(ModelId(7), queue)].into(), devices: vec![1], order, wake_margin };
        let arrival = |number: u64| PastArrival {
            at: Time::ZERO + Duration::from_millis(5_000 + 20 * number),
            budget: Duration::from_millis(30),
            model: ModelId(if number == 3 { 99 } else { 7 }),
            size: 1,
            level: 0,
        };
        (served, (0..500).map(arrival).collect())
    }

    #[test]
    fn a_servers_requests_are_replayed_at_other_rates() {
        let (served, arrivals) = served();
        let recorded = served.recorded(&arrivals).unwrap();
        assert_eq!((recorded.arrivals.len(), recorded.models.len(), recorded.devices), (499, 1, 1));
        assert_eq!(recorded.models[0].slo, Some(Duration::from_millis(30)));
        let rows = recorded.curve(&Setting::of(&recorded), &[1.0, 100.0], || true).unwrap();
        let shares: Vec<f64> = rows.iter().map(|row| row.all.attainment).collect();
        assert_eq!(rows.iter().map(|row| row.rate).collect::<Vec<_>>(), [1.0, 100.0]);
        assert!(shares[0] == 1.0 && shares[1] < 0.5, "{shares:?}");
        // More devices carry more.
        let more = Setting { devices: 8, ..Setting::of(&recorded) };
        let more = recorded.curve(&more, &[100.0], || true).unwrap();
        assert!(more[0].all.attainment > shares[1], "{more:?}");
    }

    #[test]
    fn a_curve_ends_when_its_time_is_over_but_has_one_point() {
        let (served, arrivals) = served();
        let recorded = served.recorded(&arrivals).unwrap();
        let rows = recorded.curve(&Setting::of(&recorded), &[1.0, 2.0, 3.0], || false).unwrap();
        assert_eq!(rows.len(), 1);
    }

    #[test]
    fn a_server_without_requests_or_with_unlike_devices_has_no_curve() {
        let (served, arrivals) = served();
        assert!(matches!(served.recorded(&arrivals[3..4]), Err(BadLog::NoRequests(_))));
        let unlike = Served { devices: vec![1, 0, 2], ..served.clone() };
        assert!(matches!(unlike.recorded(&arrivals), Err(BadLog::Kinds(2))));
        let none = Served { devices: vec![0], ..served };
        assert!(matches!(none.recorded(&arrivals), Err(BadLog::NoDevices)));
    }
}
