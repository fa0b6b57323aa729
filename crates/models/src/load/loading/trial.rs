//! The trial of a model at load, with made-up requests. The trial only advises, since made-up
//! numbers suit not every model.

use anyhow::ensure;
use downbeat_core::device::PaddedTo;
use downbeat_engine::{Lane, Model, Place, Share};
use downbeat_host::device::PolicyError;
use downbeat_host::request::batch_codec::BatchCodec;
use downbeat_repository::ModelFormat;

use super::Loading;
use crate::load::model_source::is_emulated;
use crate::load::warm_up::{self, Trial};

/// A model's failed trial, for messages.
const TRIED: &str = "the model answers none of the trial requests (random numbers, ones, zeros)";
/// The remedy for a model that needs other requests, for messages.
const SAMPLE: &str = "a sample request in config.pbtxt (model_warmup)";

impl Loading<'_> {
    /// Whether made-up requests reach the model. Code may count its requests, or act on them, so its
    /// author can keep them away.
    pub(super) fn takes_made_up(&self) -> bool {
        let has_samples = !self.definition.warmups.is_empty();
        self.definition.format != ModelFormat::Python || (self.context.options.profiling.enabled && !has_samples)
    }

    /// Tries the model on a lane. Returns the codec with requests that the model answers: made-up
    /// ones, or else the first sample of one item that its configuration names. A model without
    /// either is served without having been measured.
    ///
    /// # Errors
    /// The errors of [`warm_up::find_answer`]; an error if another engine may answer; an error if
    /// the model answers no request, but the version that it replaces does.
    pub(super) fn try_out(
        &mut self,
        codec: BatchCodec,
        model: &dyn Model,
        lane: &mut dyn Lane,
    ) -> anyhow::Result<BatchCodec> {
        if !self.takes_made_up() {
            let (codec, has_sample) = self.with_named_sample(codec)?;
            self.is_measured = has_sample;
            return Ok(codec);
        }
        let reason = match warm_up::find_answer(&codec, model, lane, self.context.clock)? {
            Trial::Answers { fill, sample, took } => {
                self.first = Some(took);
                let codec = codec.with_fill(fill);
                return Ok(match sample {
                    None => codec,
                    Some(sample) => codec.with_sample(sample),
                });
            }
            Trial::Refuses(reason) => reason,
        };
        if self.definition.warmups.is_empty()
            && let Some(error) = self.elsewhere(&reason)
        {
            return Err(error);
        }
        let name = &self.definition.name;
        let (codec, has_sample) = self.with_named_sample(codec)?;
        self.is_measured = has_sample;
        if has_sample {
            return Ok(codec);
        }
        if self.definition.warmups.is_empty() {
            ensure!(
                !self.must_answer,
                "{TRIED}; the error of the first: {reason}. The version in service answered such requests, so that \
                 version stays. If the new file is right, add {SAMPLE}, or unload the model first"
            );
            tracing::warn!(
                model = %name, version = %self.version,
                "{TRIED}; the error of the first: {reason}. The model is served, and measured by its first requests; \
                 with {SAMPLE} the server tries and measures the model at load"
            );
        }
        Ok(codec)
    }

    /// The codec, with the first sample of one item if the configuration names such a sample: then true.
    fn with_named_sample(&self, codec: BatchCodec) -> anyhow::Result<(BatchCodec, bool)> {
        let samples = warm_up::samples(&self.definition, &codec)?;
        let sample = samples.iter().find(|sample| sample.name.is_some() && sample.request.rows == 1);
        Ok(match sample {
            Some(sample) => (codec.with_sample(sample.request.clone()), true),
            None => (codec, false),
        })
    }

    /// Why the policy cannot have a model whose answers the check of padding did not like, or could
    /// not get.
    pub(super) fn padding_refused(
        &self,
        error: anyhow::Error,
        codec: &BatchCodec,
        model: &dyn Model,
        device: usize,
    ) -> PolicyError {
        let tried = model.lane_at(Place { device, share: Share::Whole }).ok();
        let clock = self.context.clock;
        let tried = tried.and_then(|mut lane| warm_up::find_answer(codec, model, &mut *lane, clock).ok());
        PolicyError { is_untried: matches!(tried, Some(Trial::Refuses(_))), ..self.refuses(error) }
    }

    /// Leaves a model whose requests vary in shape to `exclusive`, as `auto` would, where padding
    /// costs more than batches gain. On a CPU a padded element takes as long as any other.
    /// `elastic` pads all requests to the longest allowed, `staged` to the longest of a batch,
    /// while `exclusive` pads none.
    ///
    /// # Errors
    /// If the user did not name the policy for just this model. Otherwise a warning names the cost.
    pub(super) fn check_padding_pays(&self) -> Result<(), PolicyError> {
        let policy = self.policy.name;
        let Some(padded) = self.policy.settings.costly_padding() else { return Ok(()) };
        if self.on_gpus || is_emulated(&self.definition) {
            return Ok(());
        }
        let longest = self.policy.padding.max_length.map_or("4096".to_owned(), |longest| longest.to_string());
        let costs = match padded {
            PaddedTo::Allowed => format!("the policy pads every request to {longest} (max_length)"),
            PaddedTo::Batch => "the policy pads every request to the longest of its batch".to_owned(),
        };
        let model = &self.definition.name;
        let is_named = self.context.options.names_device_policy(model, self.definition.device);
        if is_named {
            tracing::warn!(
                %model, %policy,
                "on a CPU a padded element takes as long as any other, and {costs}; the policy exclusive, which auto \
                 would choose, answered up to 170 times as many requests"
            );
            return Ok(());
        }
        Err(self.refuses(format!(
            "on a CPU a padded element takes as long as any other, and {costs}; to use the policy nevertheless, name \
             the model in a group ([[device.groups]] models = [\"{model}\"])"
        )))
    }
}
