//! The candidates of a trial.

use super::closed_loop::ClosedLoop;
use super::past::PastArrival;
use super::replay::Stage;
use super::setting::Setting;
use crate::cluster::behaviour::Behaviour;
use crate::cluster::demand::ENOUGH;
use crate::cluster::load_regime::IMPATIENT_SIZE;
use crate::cluster::model_options::ModelOptions;
use crate::cluster::order::Order;

/// How far a candidate of a model waits.
const WAITS: [u8; 3] = [0, 50, 100];
/// The sizes that drops aim at, in throughput and size (percent). If some fare alike, the first of
/// them stays. Head drop tips over just above its capacity, so it comes last among the first
/// [`FIRST_AIMS`].
const AIMS: [(u8, u8); 5] = [(ENOUGH, IMPATIENT_SIZE), (100, 100), (0, 100), (ENOUGH, 100), (80, 100)];
/// The first aims, which are tried with all waits and limits.
const FIRST_AIMS: usize = 3;
/// The largest batch, in throughput (percent).
const LIMITS: [u8; 4] = [0, ENOUGH, 100, 80];
const FIRST_LIMITS: usize = 3;
/// The share of executions that finish within their planned time, percent.
const KEPT: [Option<u8>; 3] = [Some(84), None, Some(98)];
/// A model that can save less than this share of the mean over the models should not wait.
const LITTLE: f64 = 1.0 / 8.0;

/// A single change to a model's behaviour.
#[derive(Clone, Copy)]
enum Change {
    Wait(u8),
    Aim((u8, u8)),
    Limit(u8),
    Kept(Option<u8>),
}

/// The setting in which a batch waits for all clients of its model. `None`: no model has clients
/// that wait for answers.
pub(super) fn together(stage: &Stage, current: &Setting) -> Option<Setting> {
    if stage.loops.iter().all(|closed| closed.clients().is_none()) {
        return None;
    }
    let behaviour = |((options, closed), current): ((&Option<ModelOptions>, &ClosedLoop), &Option<Behaviour>)| {
        let (Some(options), Some(clients)) = (options, closed.clients()) else { return *current };
        let (profile, most) = (options.profiles.first(), options.max_batch);
        let shares = (1..=100).map(|share| Behaviour {
            wait: 100,
            throughput: share,
            size: 100,
            limit: share,
            ..Behaviour::default()
        });
        let mut fitting = shares.filter(|all| all.limit(profile, most, most) == clients.min(most));
        fitting.next().or(*current)
    };
    let behaviours = stage.models.iter().zip(&stage.loops).zip(&current.behaviours).map(behaviour).collect();
    Some(Setting { behaviours, ..*current })
}

/// By model: whether waiting for company can save next to none of the device time that waiting can
/// save in all models together.
///
/// Example: one model has 200 requests a second of 0.1 ms and an SLO of 250 ms. Another has 1,800
/// of 3 ms and an SLO of 50 ms. If both wait half of their way, the second model loses fewer
/// requests. The first would also wait, for 125 ms, and save no more than 20 ms of device time a
/// second.
pub(super) fn saves_little(stage: &Stage, past: &[PastArrival]) -> Vec<bool> {
    // Seconds that one request of each model can save: its time alone, less its part of the largest
    // batch.
    let of_one = stage.models.iter().map(|options| {
        let Some(options) = options else { return 0.0 };
        let (profile, most) = (options.profiles.first(), options.max_batch.max(1));
        let part = profile.latency(most).as_secs_f64() / f64::from(most);
        (profile.latency(1).as_secs_f64() - part).max(0.0)
    });
    let mut saved: Vec<(f64, f64)> = of_one.map(|seconds| (seconds, 0.0)).collect();
    for arrival in past {
        if let Some((of_one, sum)) = saved.get_mut(arrival.model.0 as usize) {
            *sum += *of_one;
        }
    }
    let all: f64 = saved.iter().map(|(_, sum)| sum).sum();
    let least = LITTLE * all / saved.iter().filter(|(_, sum)| *sum > 0.0).count().max(1) as f64;
    saved.iter().map(|(_, sum)| *sum < least).collect()
}

/// The settings in which all models do the same, in the order of the trial. Margins are each
/// model's own.
pub(super) fn of_pool(stage: &Stage, order: Order) -> Vec<Setting> {
    let first = WAITS.into_iter().flat_map(|wait| {
        AIMS[..FIRST_AIMS].iter().flat_map(move |aim| {
            LIMITS[..FIRST_LIMITS]
                .iter()
                .map(move |limit| [Change::Wait(wait), Change::Aim(*aim), Change::Limit(*limit), Change::Kept(KEPT[0])])
        })
    });
    let behaviours = stage.models.iter().map(|model| model.as_ref().map(|_| Behaviour::default())).collect();
    let none = Setting { behaviours, order };
    first
        .map(|changes| changes.into_iter().fold(none.clone(), |all, change| changed(stage, &all, None, change)))
        .collect()
}

/// The settings that differ from `setting` in one change, for one model or for all.
pub(super) fn near(stage: &Stage, setting: &Setting, model: Option<usize>) -> Vec<Setting> {
    let waits = WAITS.into_iter().map(Change::Wait);
    let others = AIMS.into_iter().map(Change::Aim).chain(LIMITS.into_iter().map(Change::Limit));
    let all = waits.chain(others).chain(KEPT.into_iter().map(Change::Kept));
    all.map(|change| changed(stage, setting, model, change)).collect()
}

/// The same setting in the other orders, if several models take turns and the trial may change the
/// order.
pub(super) fn in_other_orders(stage: &Stage, setting: &Setting) -> Vec<Setting> {
    let several = stage.tries_orders && stage.models.iter().flatten().count() > 1;
    let others = Order::ALL.into_iter().filter(|order| several && *order != setting.order);
    others.map(|order| Setting { order, ..setting.clone() }).collect()
}

fn changed(stage: &Stage, setting: &Setting, model: Option<usize>, change: Change) -> Setting {
    let mut setting = setting.clone();
    for (index, behaviour) in setting.behaviours.iter_mut().enumerate() {
        let Some(behaviour) = behaviour.as_mut().filter(|_| model.is_none_or(|model| model == index)) else { continue };
        match change {
            Change::Wait(wait) => {
                let waits = stage.saves_little.get(index).is_none_or(|little| !little);
                behaviour.wait = if waits { wait } else { 0 };
            }
            Change::Aim((throughput, size)) => (behaviour.throughput, behaviour.size) = (throughput, size),
            Change::Limit(limit) => behaviour.limit = limit,
            Change::Kept(kept) => {
                let noise = stage.noise.get(index);
                behaviour.margin = kept.and_then(|kept| Some(noise?.margin(kept))).unwrap_or(0);
            }
        }
    }
    setting
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::batch_policy::DropPolicy;
    use crate::cluster::dispatch_policy::DispatchPolicy;
    use crate::cluster::model_options::ModelOptions;
    use crate::cluster::rehearsal::noise::ExecutionNoise;
    use crate::ids::ModelId;
    use crate::profile::LatencyProfile;
    use crate::time::{Duration, Time};

    /// Three models, of which the second is gone. Executions of the last take 10% more than its
    /// profile says.
    fn stage() -> Stage {
        let profile = LatencyProfile::from_table(vec![Duration::from_millis(1)]).unwrap();
        let options = ModelOptions::new(profile, DispatchPolicy::Adaptive { consolidate: false }, DropPolicy::Adaptive);
        let mut slow = ExecutionNoise::default();
        slow.add(1.1);
        let noise = vec![ExecutionNoise::default(), ExecutionNoise::default(), slow];
        Stage { models: vec![Some(options.clone()), None, Some(options)], noise, ..Stage::default() }
    }

    #[test]
    fn all_do_the_same_each_with_its_own_margin() {
        let candidates = of_pool(&stage(), Order::Fair);
        assert_eq!(candidates.len(), 27);
        assert!(candidates.iter().all(|candidate| candidate.order == Order::Fair));
        for candidate in candidates {
            let [Some(first), None, Some(last)] = candidate.behaviours[..] else { panic!("{candidate:?}") };
            assert_eq!((first.margin, last), (0, Behaviour { margin: 10, ..first }));
        }
    }

    #[test]
    fn one_model_alone_differs_in_one_thing() {
        let all = of_pool(&stage(), Order::default()).remove(0);
        for other in near(&stage(), &all, Some(2)) {
            let (Some(own), Some(others)) = (all.behaviours[2], other.behaviours[2]) else { panic!("{other:?}") };
            assert_eq!(all.behaviours[..2], other.behaviours[..2]);
            let aim = |behaviour: Behaviour| (behaviour.throughput, behaviour.size);
            let same = [
                own.wait == others.wait,
                aim(own) == aim(others),
                own.limit == others.limit,
                own.margin == others.margin,
            ];
            assert!(same.iter().filter(|same| !**same).count() <= 1, "{others:?}");
        }
        let unset = Setting { behaviours: vec![None; 3], order: Order::Urgency };
        assert!(near(&stage(), &unset, None).iter().all(|other| *other == unset), "the rule has nothing to be varied");
    }

    /// With company the first model saves 2 of 3 ms a request, the last 0.2 of 0.3 ms.
    #[test]
    fn a_model_that_saves_little_does_not_wait_because_others_do() {
        let mut stage = stage();
        for (model, beta_us) in [(0, 2_000), (2, 200)] {
            let (alpha, beta) = (Duration::from_micros(beta_us / 2), Duration::from_micros(beta_us));
            let profile = LatencyProfile::linear(alpha, beta, 1 << 10).unwrap();
            let adaptive = DispatchPolicy::Adaptive { consolidate: false };
            stage.models[model] = Some(ModelOptions::new(profile, adaptive, DropPolicy::Adaptive));
        }
        let arrivals = |counts: [u32; 2]| -> Vec<PastArrival> {
            let of = |(model, count): (u32, u32)| {
                let (at, budget) = (Time::ZERO, Duration::from_millis(50));
                (0..count).map(move |_| PastArrival { at, budget, model: ModelId(model), size: 1, level: 0 })
            };
            [0, 2].into_iter().zip(counts).flat_map(of).collect()
        };
        assert_eq!(saves_little(&stage, &arrivals([100, 100])), [false, true, false], "a tenth, of half the sum");
        assert_eq!(saves_little(&stage, &arrivals([100, 50])), [false, true, true]);
        assert_eq!(saves_little(&stage, &arrivals([0, 50])), [true, true, false]);
        assert_eq!(saves_little(&stage, &[]), [false; 3], "nothing is known");
        stage.saves_little = saves_little(&stage, &arrivals([100, 50]));
        let waits =
            |setting: &Setting| [0, 2].map(|model: usize| setting.behaviours[model].map(|behaviour| behaviour.wait));
        let all = of_pool(&stage, Order::default());
        assert!(all.iter().any(|setting| waits(setting) == [Some(50), Some(0)]));
        let near = near(&stage, &all[0], Some(2));
        assert!(all.iter().chain(&near).all(|setting| waits(setting)[1] == Some(0)));
    }

    #[test]
    fn orders_are_tried_where_several_models_have_turns() {
        let setting = of_pool(&stage(), Order::Urgency).remove(0);
        let orders =
            |stage: &Stage| in_other_orders(stage, &setting).iter().map(|other| other.order).collect::<Vec<_>>();
        let mut stage = Stage { tries_orders: true, ..stage() };
        assert_eq!(orders(&stage), [Order::Shortest, Order::Fair]);
        stage.models[2] = None;
        assert_eq!(orders(&stage), []);
    }
}
