//! The division of a device among its models.

use std::collections::{BTreeMap, VecDeque};

use super::decision::{BadShare, ShareReason, SpatialOptions, SpatialOutput, SpatialTimeout};
use super::fair_share::{Claim, FairShare};
use super::self_tuning::{MeasuredWindow, Tuned};
use super::shared_model::{ShareState, SharedModel, SpatialModel};
use crate::device::launch::Span;
use crate::ids::ModelId;
use crate::time::Time;

/// On how much of a device each of its models runs (GSLICE §3.2, §3.3.1).
///
/// **Shares.** A model asks for its knee when it comes, and for what its [`SelfTuning`](super::SelfTuning) says later; [`FairShare`] gives out what there is. All shares are divided anew when a
/// model comes or goes. Otherwise a share changes by more than [`SpatialOptions::threshold`] or not at all, and not within [`SpatialOptions::hold_down`] of its last change; models whose
/// batches miss or keep their SLO five times in a row are looked at at once, the others every [`SpatialOptions::period`]. A share that was set by hand is left alone.
///
/// **Active and standby** (§3.2.4). A model runs where it is until lanes with its next share are ready, and changes over between two launches. Who grows waits for those who shrink: what models run on
/// is never more than the device has. A model for which no lanes can be made stays as it is for the hold-down, and the others share the rest.
///
/// **Contract.** Time never goes back. After each `handle_*` call [`poll_output`](Self::poll_output) until it gives nothing, carry the outputs out, then ask
/// [`poll_timeout`](Self::poll_timeout) when to call [`handle_timeout`](Self::handle_timeout). Each [`SpatialOutput::Prepare`] is answered by one [`handle_prepared`](Self::handle_prepared), unless its model
/// goes before. Events of models that are not there are ignored. Same calls, same decisions.
#[derive(Debug)]
pub struct Spatial {
    options: SpatialOptions,
    models: BTreeMap<ModelId, SharedModel>,
    outputs: VecDeque<SpatialOutput>,
    /// When shares are looked at next.
    next: Time,
}

/// Why shares are divided.
enum Cause {
    Came(ModelId),
    Went(ModelId),
    /// Shares do not suit, and why.
    Tuned(BTreeMap<ModelId, ShareReason>),
    ByHand(ModelId),
    Failed(ModelId),
    /// What failed is tried again.
    Again,
}

impl Cause {
    /// Why a model has another target, that had its former for a reason.
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
    /// A device without models. Asserts that it has a step to give.
    pub fn new(options: SpatialOptions) -> Self {
        assert!(options.grain > 0 && options.units >= options.grain, "a device has at least one share to give");
        Spatial { options, models: BTreeMap::new(), outputs: VecDeque::new(), next: Time::MAX }
    }

    /// Where a model's lanes stand.
    pub fn share(&self, model: ModelId) -> Option<ShareState> {
        self.models.get(&model).map(|model| model.state)
    }

    /// The most items of a model's batches.
    pub fn limit(&self, model: ModelId) -> Option<u32> {
        self.models.get(&model).map(|model| model.batch.limit())
    }

    /// A model comes, or changes; `None`: it goes, and what is prepared for it with it.
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

    /// A window of a model's work is over.
    pub fn handle_window(&mut self, id: ModelId, window: &MeasuredWindow) {
        if let Some(model) = self.models.get_mut(&id) {
            model.tuning.handle_window(window);
        }
    }

    /// A batch of a model has run, now or before. One that began with another share says nothing.
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

    /// Lanes are ready, or could not be made: then the model stays where it is. What was not asked for is ignored.
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

    /// Somebody sets a model's share, which stays as it is from then on; `None`: sets it free.
    ///
    /// # Errors
    /// If there is no such model, or the others could not have a share then; nothing is changed.
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

    /// The time that [`poll_timeout`](Self::poll_timeout) asked for has come. At another time it does no harm.
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

    /// The next decision.
    pub fn poll_output(&mut self) -> Option<SpatialOutput> {
        self.outputs.pop_front()
    }

    /// When to call [`handle_timeout`](Self::handle_timeout), and why.
    pub fn poll_timeout(&self) -> Option<(Time, SpatialTimeout)> {
        (!self.models.is_empty()).then_some((self.next, SpatialTimeout::Period))
    }

    /// Gives out the device anew if one of these models asks for something else than before. Then all are asked: nobody gets by what it asked for long ago, and is
    /// held down with that.
    fn tune_all(&mut self, now: Time, ids: &[ModelId]) {
        let mut tuned: BTreeMap<_, _> = ids.iter().filter_map(|id| Some((*id, self.tune(now, *id)?))).collect();
        if tuned.is_empty() {
            return;
        }
        let others: Vec<ModelId> = self.models.keys().copied().filter(|id| !ids.contains(id)).collect();
        tuned.extend(others.into_iter().filter_map(|id| Some((id, self.tune(now, id)?))));
        self.divide(now, &Cause::Tuned(tuned));
    }

    /// What a model asks for by what it achieves; says why, if that is something else than before.
    fn tune(&mut self, now: Time, id: ModelId) -> Option<ShareReason> {
        let SpatialOptions { units, grain, threshold, tunes, .. } = self.options;
        let model = self.models.get_mut(&id).filter(|model| tunes && model.is_free(now))?;
        let (active, most) = (f64::from(model.state.active), f64::from(units));
        // Who lacks something does not ask for less than before, who has something to spare not for more.
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

    /// Gives out the device anew.
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

    /// What each model is to have.
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
            // Those whose share would hardly change keep it, and the rest is for the others.
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
            // Who has a share keeps it.
            let is_new = |id: &ModelId| self.models.get(id).is_some_and(|model| model.state.target == 0);
            let refused: Vec<ModelId> = claims.keys().copied().filter(is_new).collect();
            claims.retain(|id, _| !refused.contains(id));
            self.outputs.extend(refused.into_iter().map(|model| SpatialOutput::NoRoom { model }));
            fair = self.fair(&shares, &claims);
        }
        shares.extend(fair.into_iter().flatten());
        shares
    }

    /// What is left beside some shares, among those who ask.
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

    /// Asks for the lanes that a model is to have next, if it has not and nothing is being made for it.
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

    /// Changes over to all lanes that are ready and for which there is room: those that shrink make it for those that grow.
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
            // Its first share was not changed.
            let held_until = if model.state.active > 0 { held_until } else { now };
            used = used - model.state.active + units;
            model.switch(now, units, held_until);
            self.outputs.push_back(SpatialOutput::Switch { model: *id, units });
        }
    }
}
