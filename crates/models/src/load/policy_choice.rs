//! Chooses a device policy for a model that is being loaded, where `auto` was asked for.

use downbeat_core::device::{AutoChoice, AutoInputs, Overlap, PolicyName, PolicySettings, SegmentProfile, Staging};
use downbeat_core::{Duration, LatencyProfile};
use downbeat_host::request::batch_codec::BatchCodec;
use downbeat_repository::ModelDefinition;
use downbeat_service::options::ServerOptions;
use downbeat_service::report::policy_report::{AutoMeasured, PolicyReport, StagingReport};

/// A model that is loaded as `exclusive` runs it.
pub struct AutoSubject<'a> {
    pub options: &'a ServerOptions,
    pub definition: &'a ModelDefinition,
    pub codec: &'a BatchCodec,
    pub profile: &'a LatencyProfile,
    /// Whether it answers made-up requests, so that the profile is measured.
    pub is_measured: bool,
    /// Cores that lanes and frontends share.
    pub cores: usize,
    pub threads: usize,
    /// Whether these are on no cores of the frontends.
    pub runs_elsewhere: bool,
    /// Batches that `exclusive` runs at once on the same cores or compute units.
    pub at_once: u32,
}

/// The chosen policy of a model under `auto`, and the measurements behind the choice.
#[derive(Clone)]
pub struct Chosen {
    /// The policy, and why.
    pub report: PolicyReport,
    /// The policy, with the settings that the user wrote for the model.
    pub policy: PolicyName,
    /// The inputs of the choice at load.
    pub inputs: AutoInputs,
    /// The measured overlap, another input; `None`: no policy could have gained by overlap.
    pub overlap: Option<Overlap>,
    pub profiled: Profiled,
    /// Whether the load must not choose again. The model could not have its policy, or the policy
    /// lost against `exclusive` in service.
    pub is_final: bool,
}

/// The inputs of a choice at load. The overlap of two lanes is not measured if no policy could gain
/// by it.
pub type Known = (AutoInputs, Option<Overlap>);

/// The measured latencies of a model.
#[derive(Clone)]
pub struct Profiled {
    /// By batch size.
    pub profile: LatencyProfile,
    /// Threads of each run.
    pub threads: usize,
    /// How many batches are worth running at the same time on the CPU; 0: not measured.
    pub at_once: u32,
}

/// Why a version is loaded by its policy.
pub enum Why {
    /// The user asked for the policy.
    Asked(PolicyReport),
    /// The user asked for `auto`: it is `exclusive`, unless another suits the model better.
    Look(PolicyReport),
    /// `auto` chose the policy at load, or `exclusive` because that policy failed.
    Chosen(Box<Chosen>),
    /// A load before has found the stages of the policy `staged`.
    Staged(Box<FoundStages>),
}

/// The stages that a load has found, for the load by these stages.
pub struct FoundStages {
    /// The stages and buffer pairs.
    pub staging: Staging,
    /// The report on them.
    pub report: StagingReport,
    /// The report on the policy.
    pub policy: PolicyReport,
    /// The choice of `auto`; `None`: the user asked for the policy.
    pub chosen: Option<Chosen>,
    /// The threads of the measurements.
    pub threads: usize,
    /// The latencies of the stages, by the measurements of the finer cut.
    pub segments: Option<SegmentProfile>,
}

impl Why {
    /// The choice of `auto` behind the load.
    pub fn chosen(&self) -> Option<&Chosen> {
        match self {
            Why::Chosen(chosen) => Some(chosen),
            Why::Staged(found) => found.chosen.as_ref(),
            Why::Asked(_) | Why::Look(_) => None,
        }
    }

    /// Whether an earlier load of the same version asked for this load.
    pub fn is_second(&self) -> bool {
        matches!(self, Why::Chosen(_) | Why::Staged(_))
    }
}

impl AutoSubject<'_> {
    /// Chooses; `launch` and `overlap` measure the inputs of the choice if it needs them.
    pub fn choose(
        &self,
        launch: impl FnOnce() -> Option<Duration>,
        overlap: impl FnOnce(Duration) -> Option<Overlap>,
    ) -> (AutoChoice, Option<AutoMeasured>, Option<Known>) {
        if let Some(reason) = self.left_to_exclusive() {
            return (AutoChoice::exclusive(reason), None, None);
        }
        let Some(launch) = launch() else {
            return (AutoChoice::exclusive("what a launch costs is not measured yet"), None, None);
        };
        let inputs = self.inputs(launch);
        let mut measured = AutoMeasured { launch, overlap: Vec::new() };
        if !inputs.could_gain() {
            return (inputs.choose_at_best(), Some(measured), Some((inputs, None)));
        }
        let Some(overlap) = overlap(launch) else {
            let reason = "two lanes cannot be measured together with requests of our own making";
            return (AutoChoice::exclusive(reason), Some(measured), Some((inputs, None)));
        };
        measured.overlap = overlap.points().iter().map(Into::into).collect();
        (inputs.choose(&overlap), Some(measured), Some((inputs, Some(overlap))))
    }

    /// Why only `exclusive` is possible; `None` if other policies are, too.
    fn left_to_exclusive(&self) -> Option<String> {
        let batching = &self.definition.batching;
        let own = self.options.models.get(&self.definition.name).and_then(|model| model.dispatch.as_ref());
        let has_levels =
            batching.levels.len() > 1 || batching.levels.iter().any(|l| l.default_timeout > Duration::ZERO);
        let reason = match () {
            () if !self.is_measured => {
                "the model answers no request of our own making, so that nothing could be measured at load"
            }
            () if !self.options.profiling.enabled => "nothing is measured here ([profiling] enabled = false)",
            () if own.or(self.definition.dispatch.as_ref()).is_some() => {
                "its scheduler is named, which makes its batches"
            }
            () if has_levels => {
                "its configuration has priority levels or queue timeouts, which other policies do not know"
            }
            () if batching.preserve_ordering => "its configuration wants one batch at a time (preserve_ordering)",
            () if batching.max_queue_delay > Duration::ZERO || !batching.preferred.is_empty() => {
                "its configuration says how batches are made (max_queue_delay_microseconds, preferred_batch_size)"
            }
            () => return None,
        };
        Some(reason.to_owned())
    }

    fn inputs(&self, launch: Duration) -> AutoInputs {
        let mut inputs = AutoInputs {
            profile: SegmentProfile::whole(self.profile),
            cut: None,
            is_batched: self.codec.batched,
            varies: self.codec.has_varying_shapes(),
            max_batch: self.codec.max_batch,
            launch,
            cores: u32::try_from(self.cores).unwrap_or(u32::MAX),
            threads: if self.runs_elsewhere { 0 } else { u32::try_from(self.threads).unwrap_or(u32::MAX) },
            at_once: self.at_once,
            lanes: Vec::new(),
            stagings: Vec::new(),
        };
        let name = &self.definition.name;
        for chosen in PolicyName::all().filter_map(|policy| self.options.settings_of(name, policy).ok()) {
            chosen.settings.tell_auto(&mut inputs);
        }
        inputs
    }
}

impl Chosen {
    /// The outcome of a choice at load.
    pub fn looked(report: PolicyReport, (inputs, overlap): Known, profiled: Profiled) -> anyhow::Result<Self> {
        let policy = report.policy.parse()?;
        Ok(Chosen { report, policy, inputs, overlap, profiled, is_final: false })
    }

    /// The same model with `exclusive` for this reason, once its policy has failed. `report` is the
    /// report on that policy.
    pub fn with_exclusive(&self, report: PolicyReport, reason: String) -> Self {
        let policy = PolicyName::EXCLUSIVE;
        let report = PolicyReport { policy: policy.to_string(), reason, ..report };
        Chosen { report, policy, is_final: true, ..self.clone() }
    }

    /// Looks at it again now that the model is cut by these settings and its segments are measured.
    ///
    /// # Errors
    /// A text, if another policy suits the model better now that it is cut.
    pub fn with_cut(mut self, cut: &SegmentProfile, settings: &dyn PolicySettings) -> Result<Self, String> {
        self.inputs.cut = Some(cut.clone());
        settings.tell_auto(&mut self.inputs);
        let choice = self.inputs.choose(&self.overlap.clone().unwrap_or_default());
        if choice.policy.name() != self.report.policy {
            return Err(format!("once it is cut, {}", choice.reason));
        }
        self.report.take_choice(&choice);
        Ok(self)
    }
}
