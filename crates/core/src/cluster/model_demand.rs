//! A model's demand on the devices at the load of the moment, and the batch sizes that follow for
//! its drops.

use super::batch_policy::{DropPolicy, remote_staggered_batch};
use super::behaviour::Behaviour;
use super::demand::{Arrivals, Demand};
use super::dispatch_policy::DispatchPolicy;
use super::kind_plan::KindPlans;
use super::load_regime::LoadRegime;
use super::rate_meter::RateMeter;
use crate::time::{Duration, Time};

/// The arrivals of one model, with the demand and behaviour that follow from them.
#[derive(Debug)]
#[repr(C)]
pub(super) struct ModelDemand {
    /// The targets must be computed again.
    pub stale: bool,
    /// The demand was set since the flag was last read.
    pub changed: bool,
    /// The queue is lent: its requests are no demand that others must plan with.
    pub lent: bool,
    pub meter: RateMeter,
    /// Zero unless the model behaves by the regime.
    pub demand: Demand,
    pub regime: LoadRegime,
    /// The behaviour that was set for the model, in place of the regime's.
    pub set: Option<Behaviour>,
}

impl ModelDemand {
    pub fn new(now: Time) -> Self {
        let (demand, regime) = (Demand::default(), LoadRegime::default());
        ModelDemand { stale: true, changed: false, lent: false, meter: RateMeter::new(now), demand, regime, set: None }
    }

    /// Takes over a new demand.
    pub fn set_demand(&mut self, demand: Demand) {
        self.changed |= demand != self.demand;
        self.demand = demand;
    }

    /// The model's behaviour, if the model is adaptive.
    pub fn behaviour(&self, consolidate: bool) -> Behaviour {
        self.set.unwrap_or_else(|| self.regime.behaviour(consolidate))
    }

    /// Counts an arrival. Requests that find no room count too: the offered load matters.
    pub fn arrival(&mut self, now: Time, size: u32, allowed: Duration) {
        self.stale |= self.meter.arrival(now, size, allowed);
    }

    /// Computes the targets again, and an adaptive model's demand, if time or a change has made
    /// them stale.
    pub fn refresh(
        &mut self,
        now: Time,
        is_adaptive: bool,
        drop: DropPolicy,
        dispatch: &DispatchPolicy,
        kinds: &mut KindPlans,
    ) {
        self.stale |= self.meter.roll(now);
        if !std::mem::take(&mut self.stale) {
            return;
        }
        let budget = self.meter.budget().unwrap_or(Duration::MAX);
        let (max_batch, rate) = (kinds.max_batch, self.meter.rate());
        if is_adaptive {
            // Before the first rate is known there is no demand to compute, and without deadlines
            // no request is late.
            let demand = match rate {
                Some(rate) if budget != Duration::MAX && budget != Duration::ZERO && !self.lent => {
                    let (variance, even_variance) = (self.meter.variance(), self.meter.even_variance());
                    let arrivals = Arrivals { rate, variance, even_variance };
                    Demand::of(&kinds.fastest().sent, max_batch, budget, arrivals, kinds.devices())
                }
                _ => Demand::default(),
            };
            self.set_demand(demand);
        }
        // `consolidate` makes no difference to the size that drops aim at.
        let behaviour = self.behaviour(false);
        for plan in kinds.plans.iter_mut().filter(|plan| plan.in_use) {
            let staggered = remote_staggered_batch(&plan.profile, max_batch, budget, rate, plan.devices, &plan.network);
            plan.target = match drop {
                DropPolicy::Adaptive => behaviour.target(&plan.sent, staggered),
                _ => staggered,
            };
            plan.limit = match dispatch.is_adaptive() {
                true => behaviour.limit(&plan.sent, staggered, max_batch),
                false => max_batch,
            };
            plan.enough = dispatch.enough(&plan.sent, max_batch, rate, plan.devices);
        }
    }
}
