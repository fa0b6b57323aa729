//! The division of a device among its models.

use std::collections::{BTreeMap, VecDeque};

use super::decision::{BadShare, ShareReason, SpatialOptions, SpatialOutput, SpatialTimeout};
use super::fair_share::{Claim, FairShare};
use super::self_tuning::{MeasuredWindow, Tuned};
use super::shared_model::{ShareState, SharedModel, SpatialModel};
use crate::device::launch::Span;
use crate::ids::ModelId;
use crate::time::Time;

/// Decides on how much of a device each of its models runs (GSLICE §3.2, §3.3.1).
///
/// **Shares.** A new model asks for its knee, and later for the share that its
/// [`SelfTuning`](super::SelfTuning) finds. [`FairShare`] divides the device among the demands. All
/// shares are divided anew when a model comes or goes. Otherwise a share changes only by more than
/// [`SpatialOptions::threshold`], and only after [`SpatialOptions::hold_down`] since its last
/// change. A model whose batches miss or keep their SLO five times in a row is tuned at once, the
/// others every [`SpatialOptions::period`]. A share that was set by hand stays.
///
/// **Active and standby** (§3.2.4). A model runs on its lanes until lanes with its next share are
/// ready, and changes over between two launches. Models that grow wait for models that shrink, so
/// that all active shares together never exceed the device. A model whose lanes cannot be made
/// keeps its share for the hold-down, and the others divide the rest.
///
/// **Contract.** Time never goes back. After each `handle_*` call
/// [`poll_output`](Self::poll_output) until it returns `None`, and carry the outputs out. Then ask
/// [`poll_timeout`](Self::poll_timeout) when to call [`handle_timeout`](Self::handle_timeout). Each
/// [`SpatialOutput::Prepare`] is answered by one [`handle_prepared`](Self::handle_prepared), unless
/// its model goes before. Events of unknown models are ignored. The same calls give the same
/// decisions.
#[derive(Debug)]
pub struct Spatial {
    options: SpatialOptions,
    models: BTreeMap<ModelId, SharedModel>,
    outputs: VecDeque<SpatialOutput>,
    /// When shares are next tuned.
    next: Time,
}

/// The reason for a new division.
enum Cause {
    Came(ModelId),
    Went(ModelId),
    /// The shares of these models do not suit, for these reasons.
    Tuned(BTreeMap<ModelId, ShareReason>),
    ByHand(ModelId),
    Failed(ModelId),
    /// Lanes that could not be made are tried again.
    Again,
}

impl Cause {
    /// The reason for a model's new target. `former` is the reason for its former target.
    fn reason(&self, id: ModelId, former: ShareReason) -> ShareReason {
        match self {
            Cause::Came(of) if *of == id => ShareReason::Came,
            Cause::ByHand(of) if *of == id => ShareReason::ByHand,
            Cause::Came(of) => ShareReason::OtherCame(*of),
            Cause::Went(of) => ShareReason::OtherWent(*of),
            Cause::ByHand(of) => ShareReason::OtherByHand(*of),
            Cause::Failed(of) => ShareReason::OtherFailed(*of),
            Cause::Tuned(of) => match (of.get(&id), of.keys().next()) {
                (None, Some(first)) => ShareReason::OtherTuned(*first),
                (own, _) => own.copied().unwrap_or(former),
            },
            Cause::Again => former,
        }
    }
}

impl Spatial {
    /// A device without models. Asserts that the device has at least one step.
    pub fn new(options: SpatialOptions) -> Self {
        assert!(options.grain > 0 && options.units >= options.grain, "a device has at least one share to give");
        Spatial { options, models: BTreeMap::new(), outputs: VecDeque::new(), next: Time::MAX }
    }

    /// The state of a model's share.
    pub fn share(&self, model: ModelId) -> Option<ShareState> {
        self.models.get(&model).map(|model| model.state)
    }

    /// The most items of a model's batches.
    pub fn limit(&self, model: ModelId) -> Option<u32> {
        self.models.get(&model).map(|model| model.batch.limit())
    }

    /// Adds or changes a model. `None` removes the model and its standby lanes.
    pub fn handle_model(&mut self, now: Time, id: ModelId, comes: Option<SpatialModel>) {
        let Some(model) = comes else {
            if self.models.remove(&id).is_some() {
                self.divide(now, &Cause::Went(id));
            }
            return;
        };
        if self.models.is_empty() {
            self.next = now + self.options.period;
        }
        let mut model = SharedModel::new(model, &self.options);
        model.state = self.share(id).unwrap_or_default();
        self.outputs.push_back(SpatialOutput::Limit { model: id, rows: model.batch.limit() });
        self.models.insert(id, model);
        self.divide(now, &Cause::Came(id));
    }

    /// Handles the end of a window of a model's work.
    pub fn handle_window(&mut self, id: ModelId, window: &MeasuredWindow) {
        if let Some(model) = self.models.get_mut(&id) {
            model.tuning.handle_window(window);
        }
    }

    /// Handles a batch of a model that has run, now or earlier. A batch that began under another
    /// share is ignored.
    pub fn handle_batch(&mut self, now: Time, id: ModelId, rows: u32, ran: Span) {
        let Some(model) = self.models.get_mut(&id).filter(|model| ran.start >= model.changed) else { return };
        let before = model.batch.limit();
        model.tuning.handle_batch(rows >= before);
        let signal = model.batch.handle_batch(rows, ran.end.since(ran.start));
        let rows = model.batch.limit();
        if rows != before {
            self.outputs.push_back(SpatialOutput::Limit { model: id, rows });
        }
        if signal.is_some() {
            self.tune_all(now, &[id]);
        }
    }

    /// Handles the result of a preparation. If no lanes could be made, the model keeps its share. A
    /// result that was not asked for is ignored.
    pub fn handle_prepared(&mut self, now: Time, id: ModelId, made: bool) {
        let again = now + self.options.hold_down;
        let Some(model) = self.models.get_mut(&id) else { return };
        let Some((units, false)) = model.state.standby else { return };
        if made {
            model.state.standby = Some((units, true));
            self.ask(id);
            self.change_over(now);
        } else {
            model.state = ShareState { standby: None, target: model.state.active, ..model.state };
            model.failed_until = Some(again);
            self.divide(now, &Cause::Failed(id));
        }
    }

    /// Sets a model's share by hand, which then stays. `None` sets the share free.
    ///
    /// # Errors
    /// If there is no such model, the share is no multiple of the grain, or the rest would not
    /// suffice for the others; then nothing has changed.
    pub fn handle_share(&mut self, now: Time, id: ModelId, share: Option<u32>) -> Result<(), BadShare> {
        let SpatialOptions { units: all, grain, .. } = self.options;
        let others = self.models.iter().filter(|(other, _)| **other != id);
        let taken: u32 = others.map(|(_, other)| if other.state.by_hand { other.state.target } else { grain }).sum();
        let most = all.saturating_sub(taken) / grain * grain;
        let model = self.models.get_mut(&id).ok_or(BadShare::NoModel(id))?;
        if let Some(units) = share {
            if units == 0 || !units.is_multiple_of(grain) || units > most {
                return Err(BadShare::Units { units, grain, most });
            }
            model.demand = f64::from(units);
            model.state.target = units;
            model.failed_until = None;
        }
        model.state.by_hand = share.is_some();
        self.divide(now, &Cause::ByHand(id));
        Ok(())
    }

    /// Handles the time that [`poll_timeout`](Self::poll_timeout) returned. A call at another time
    /// does no harm.
    pub fn handle_timeout(&mut self, now: Time) {
        if now < self.next {
            return;
        }
        self.next = now + self.options.period;
        let mut is_due = false;
        for model in self.models.values_mut() {
            is_due |= model.failed_until.take_if(|until| *until <= now).is_some();
        }
        if is_due {
            self.divide(now, &Cause::Again);
        }
        let ids: Vec<ModelId> = self.models.keys().copied().collect();
        self.tune_all(now, &ids);
    }

    /// Takes the next decision.
    pub fn poll_output(&mut self) -> Option<SpatialOutput> {
        self.outputs.pop_front()
    }

    /// When to call [`handle_timeout`](Self::handle_timeout), and the reason.
    pub fn poll_timeout(&self) -> Option<(Time, SpatialTimeout)> {
        (!self.models.is_empty()).then_some((self.next, SpatialTimeout::Period))
    }

    /// Divides the device anew if one of these models changes its demand. Then all models are
    /// tuned, so that no share follows from an old demand and is then held down.
    fn tune_all(&mut self, now: Time, ids: &[ModelId]) {
        let mut tuned: BTreeMap<_, _> = ids.iter().filter_map(|id| Some((*id, self.tune(now, *id)?))).collect();
        if tuned.is_empty() {
            return;
        }
        let others: Vec<ModelId> = self.models.keys().copied().filter(|id| !ids.contains(id)).collect();
        tuned.extend(others.into_iter().filter_map(|id| Some((id, self.tune(now, id)?))));
        self.divide(now, &Cause::Tuned(tuned));
    }

    /// Updates a model's demand by its measurements. Returns the reason if the demand has changed.
    fn tune(&mut self, now: Time, id: ModelId) -> Option<ShareReason> {
        let SpatialOptions { units, grain, threshold, tunes, .. } = self.options;
        let model = self.models.get_mut(&id).filter(|model| tunes && model.is_free(now))?;
        let (active, most) = (f64::from(model.state.active), f64::from(units));
        // A model that lacks something never asks for less than before. A model with something to
        // spare never asks for more.
        let (demand, reason) = match model.tuning.tune() {
            Tuned::Suits => return None,
            Tuned::More { factor, latency, throughput } => {
                ((active * factor).min(most).max(model.demand), ShareReason::TooSmall { latency, throughput })
            }
            Tuned::Less { factor } => {
                ((active * factor).max(f64::from(grain)).min(model.demand), ShareReason::TooLarge)
            }
        };
        if (demand - model.demand).abs() <= threshold * model.demand {
            return None;
        }
        model.demand = demand;
        Some(reason)
    }

    /// Divides the device anew.
    fn divide(&mut self, now: Time, cause: &Cause) {
        let shares = self.divided(now, cause);
        for (id, units) in shares {
            let Some(model) = self.models.get_mut(&id) else { continue };
            let is_set = matches!(cause, Cause::ByHand(of) if *of == id);
            if units != model.state.target || is_set {
                model.state.target = units;
                model.reason = cause.reason(id, model.reason);
            }
        }
        let ids: Vec<ModelId> = self.models.keys().copied().collect();
        ids.into_iter().for_each(|id| self.ask(id));
        self.change_over(now);
    }

    /// The target of each model.
    fn divided(&mut self, now: Time, cause: &Cause) -> BTreeMap<ModelId, u32> {
        let by_tuning = matches!(cause, Cause::Tuned(_));
        let stays = |model: &SharedModel| {
            model.state.by_hand || model.failed_until.is_some() || by_tuning && !model.is_free(now)
        };
        let mut shares: BTreeMap<ModelId, u32> =
            self.models.iter().filter(|(_, model)| stays(model)).map(|(id, model)| (*id, model.state.target)).collect();
        let mut claims: BTreeMap<ModelId, Claim> = self.models.iter().map(|(id, model)| (*id, model.claim())).collect();
        claims.retain(|id, _| !shares.contains_key(id));
        if by_tuning && let Some(first) = self.fair(&shares, &claims) {
            // Models whose share would hardly change keep it, and the others divide the rest.
            for (id, units) in first {
                let target = self.models.get(&id).map_or(0, |model| model.state.target);
                if f64::from(units.abs_diff(target)) <= self.options.threshold * f64::from(target) {
                    claims.remove(&id);
                    shares.insert(id, target);
                }
            }
        }
        let mut fair = self.fair(&shares, &claims);
        if fair.is_none() {
            // A model that has a share keeps it.
            let is_new = |id: &ModelId| self.models.get(id).is_some_and(|model| model.state.target == 0);
            let refused: Vec<ModelId> = claims.keys().copied().filter(is_new).collect();
            claims.retain(|id, _| !refused.contains(id));
            self.outputs.extend(refused.into_iter().map(|model| SpatialOutput::NoRoom { model }));
            fair = self.fair(&shares, &claims);
        }
        shares.extend(fair.into_iter().flatten());
        shares
    }

    /// Divides the units beside some shares among the claims.
    fn fair(
        &self,
        beside: &BTreeMap<ModelId, u32>,
        claims: &BTreeMap<ModelId, Claim>,
    ) -> Option<BTreeMap<ModelId, u32>> {
        let SpatialOptions { units, grain, spread, .. } = self.options;
        let units = units.saturating_sub(beside.values().sum());
        let asked: Vec<Claim> = claims.values().copied().collect();
        let gets = FairShare { units, grain, spread }.divide(&asked)?;
        Some(claims.keys().copied().zip(gets).collect())
    }

    /// Orders lanes for a model's target, unless it has such lanes or other lanes are being made
    /// for it.
    fn ask(&mut self, id: ModelId) {
        let Some(model) = self.models.get_mut(&id) else { return };
        let ShareState { active, target, standby, .. } = model.state;
        match standby {
            Some((_, false)) => {}
            Some((units, true)) if units == target => {}
            Some(_) if target == active => {
                model.state.standby = None;
                self.outputs.push_back(SpatialOutput::Discard { model: id });
            }
            None if target == active => {}
            _ => {
                model.state.standby = Some((target, false));
                self.outputs.push_back(SpatialOutput::Prepare { model: id, units: target, reason: model.reason });
            }
        }
    }

    /// Changes over to all lanes that are ready and fit. Models that shrink make room for models
    /// that grow.
    fn change_over(&mut self, now: Time) {
        let mut used: u32 = self.models.values().map(|model| model.state.active).sum();
        let held_until = now + self.options.hold_down;
        loop {
            let fits = |model: &SharedModel| match model.state {
                ShareState { active, target, standby: Some((units, true)), .. } if units == target => {
                    used - active + units <= self.options.units
                }
                _ => false,
            };
            let Some((id, model)) = self.models.iter_mut().find(|(_, model)| fits(model)) else { break };
            let units = model.state.target;
            // A first share is no change, and is not held.
            let held_until = if model.state.active > 0 { held_until } else { now };
            used = used - model.state.active + units;
            model.switch(now, units, held_until);
            self.outputs.push_back(SpatialOutput::Switch { model: *id, units });
        }
    }
}
