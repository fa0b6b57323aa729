//! Judges whether requests of a version may share batches: by its graph, or by a check if the graph
//! does not tell.

use downbeat_core::Duration;
use downbeat_engine::{Model, Place, RunError, Share, State};
use downbeat_host::request::batch_codec::BatchCodec;
use downbeat_host::run::row_judgement::{RowJudgement, by_graph};
use downbeat_repository::{ModelDefinition, RowDependence, RowVerdict, VerdictSource};
use downbeat_service::options::BatchingChoice;

use super::Loading;
use crate::load::model_source::has_graph;
use crate::load::policy_choice::Why;
use crate::load::row_check::{NO_TIME, RowCheck};
use crate::load::warm_up::{self, Trial};

/// The check goes on with further draws for this long. A smaller budget of measuring does not
/// shorten the check.
const CHECK_BUDGET: Duration = Duration::from_millis(300);
/// Items that the check runs at least.
const CHECKED_ITEMS: u64 = 40;

impl Loading<'_> {
    /// Decides whether requests of the version may share batches, before its definition is
    /// completed.
    ///
    /// # Errors
    /// If the configuration does not fit the model; if the device is lost or out of memory.
    pub(super) fn judge(&mut self, model: &dyn Model, why: &Why) -> anyhow::Result<()> {
        self.definition.rows = None;
        if !has_graph(&self.definition) {
            return Ok(());
        }
        let mut batched = self.definition.clone();
        batched.complete(model.signature())?;
        let most = batched.batching.max_batch_size;
        let (name, choice) = (&self.definition.name, self.context.options.batching(&self.definition.name));
        if most < 2 {
            if choice == BatchingChoice::Always {
                tracing::warn!(
                    model = %name, version = %self.version,
                    "batching = \"always\" has no effect: max_batch_size forbids batches, or a first dimension of the model's inputs and outputs is fixed"
                );
            }
            return Ok(());
        }
        let (verdict, key) = match choice {
            // The user is obeyed, and hears if the graph proves that answers will be wrong.
            BatchingChoice::Always => match by_graph(&self.source.options.path).0 {
                mixed if mixed.rows == RowDependence::Mixed => (mixed, None),
                _ => (RowVerdict::chosen(true), None),
            },
            BatchingChoice::Never => (RowVerdict::chosen(false), None),
            BatchingChoice::Check => self.look_at_rows(model, &batched, why)?,
        };
        let is_obeyed = match choice {
            BatchingChoice::Always => verdict.rows == RowDependence::Mixed,
            BatchingChoice::Check => self.definition.writes_batch_size(),
            BatchingChoice::Never => false,
        };
        let judgement = RowJudgement { verdict, key, asked: is_obeyed.then_some(most) };
        if !why.is_second() {
            self.say_judgement(&judgement, most);
        }
        self.definition.rows = Some(match choice {
            BatchingChoice::Always => RowVerdict::chosen(true),
            BatchingChoice::Check | BatchingChoice::Never => judgement.verdict.clone(),
        });
        self.judgement = Some(judgement);
        Ok(())
    }

    /// Gets the verdict from the graph, from an earlier check, or from a check now. The second
    /// value is the key that a check's verdict is stored under.
    fn look_at_rows(
        &self,
        model: &dyn Model,
        batched: &ModelDefinition,
        why: &Why,
    ) -> anyhow::Result<(RowVerdict, Option<String>)> {
        let (by_graph, random) = by_graph(&self.source.options.path);
        if by_graph.rows != RowDependence::Unknown {
            return Ok((by_graph, None));
        }
        if !random.is_empty() {
            let drawn = random.join(", ");
            let reason = format!(
                "{}; the model draws random numbers ({drawn}), so its answers cannot be compared",
                by_graph.reason
            );
            return Ok((RowVerdict { reason, ..by_graph }, None));
        }
        let key = self.source.rows_key().ok();
        let known = key.as_ref().and_then(|key| self.context.rows.lock().get(key).cloned());
        // A new load may bring a sample that the check can use. The second load by another policy
        // brings none.
        let known = known.filter(|known| known.rows != RowDependence::Unknown || why.is_second());
        let stored = || key.as_ref().and_then(|key| self.source.store.get::<RowVerdict>(key));
        if let Some(known) = known.or_else(stored) {
            return Ok((known, key));
        }
        let checked = self.check_rows(model, batched)?;
        let verdict = match checked.rows {
            RowDependence::Unknown => {
                RowVerdict { reason: format!("{}; {}", by_graph.reason, checked.reason), ..checked }
            }
            _ => checked,
        };
        self.context.keep_rows(key.as_deref(), &verdict);
        Ok((verdict, key))
    }

    /// Has the model answer requests alone and together, on a lane of its own.
    pub(super) fn check_rows(&self, model: &dyn Model, batched: &ModelDefinition) -> anyhow::Result<RowVerdict> {
        let codec = BatchCodec::new(batched.inputs.clone(), batched.outputs.clone(), batched.batching.max_batch_size);
        let codec = codec.with_defaults(&self.source.defaults).map_err(anyhow::Error::msg)?;
        model.set_shapes(codec.shape_ranges(None));
        model.set_batched(true);
        let mut lane = model.lane_at(Place { device: self.first_device(model), share: Share::Whole })?;
        let unknown =
            |reason: String| RowVerdict { rows: RowDependence::Unknown, source: VerdictSource::Check, reason };
        let mut fill = Default::default();
        let (mut samples, mut first) = (Vec::new(), Duration::ZERO);
        let clock = self.context.clock;
        if batched.warmups.is_empty() {
            match warm_up::find_answer(&codec, model, &mut *lane, clock) {
                Ok(Trial::Answers { fill: found, took, .. }) => (fill, first) = (found, took),
                Ok(Trial::Refuses(reason)) => return Ok(unknown(format!("the model cannot be tried: {reason}"))),
                Err(error)
                    if error.downcast_ref::<RunError>().is_some_and(|error| error.of_device || error.of_executor) =>
                {
                    return Err(error);
                }
                Err(error) => return Ok(unknown(format!("the model cannot be tried: {error}"))),
            }
        } else {
            samples.extend(warm_up::samples(batched, &codec)?.iter().map(|sample| sample.request.clone()));
        }
        let mut lost = None;
        let mut run = |mut state: State| match lane.run(0..model.segments(), &mut state) {
            Ok(()) => Ok(state),
            Err(error) => {
                let reason = error.to_string();
                // The device failed, and not the model.
                if error.of_device || error.of_executor {
                    lost = Some(error);
                }
                Err(reason)
            }
        };
        let expected = first.saturating_mul(CHECKED_ITEMS);
        if expected > CHECK_BUDGET && !self.time.allows(expected) {
            return Ok(unknown(NO_TIME.to_owned()));
        }
        let begin = clock.now();
        let most = self.time.left().max(CHECK_BUDGET);
        let is_time = || clock.now().since(begin) < CHECK_BUDGET;
        let is_over = || !self.time.is_behind() && clock.now().since(begin) > most;
        let (is_time, is_over) = (&is_time, &is_over);
        let check = RowCheck { codec: &codec, fill, samples, run: &mut run, is_time, is_over, compared: 0 };
        let verdict = self.time.spend(clock, || check.verdict());
        if verdict.reason == NO_TIME {
            self.time.fall_short();
        }
        match lost {
            Some(error) if error.of_executor && warm_up::comes_back(model) => Ok(unknown(error.to_string())),
            Some(error) => Err(error.into()),
            None => Ok(verdict),
        }
    }

    /// Logs the consequence of the verdict, and the lines of configuration that change it.
    fn say_judgement(&self, judgement: &RowJudgement, most: u32) {
        let (model, version) = (&self.definition.name, &self.version);
        match judgement.complaint() {
            None => tracing::debug!(%model, %version, rows = %judgement.verdict, "requests share batches"),
            Some(complaint) if judgement.asked.is_some() => tracing::warn!(
                %model, %version,
                "{complaint}. Without max_batch_size in the model's config.pbtxt and `batching` in [models.{model}], \
                 requests run alone"
            ),
            Some(complaint) if judgement.verdict.source == VerdictSource::Option => {
                tracing::info!(%model, %version, "{complaint}");
            }
            Some(complaint) => tracing::warn!(
                %model, %version,
                "{complaint}. To batch requests nevertheless, set `max_batch_size: {most}` in the model's \
                 config.pbtxt, or batching = \"always\" in [models.{model}] of downbeat.toml; answers are then wrong \
                 if the rows of a batch depend on each other"
            ),
        }
    }
}
