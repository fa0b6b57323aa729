//! The options of a server while one source after another sets some of them.

use downbeat_core::Duration;
use downbeat_core::cluster::AutoscaleOptions;
use downbeat_server::options::{ModelControl, ServerOptions};

/// The options as they come together, the later source over the earlier one.
#[derive(Clone, Debug)]
pub struct Draft {
    /// All but what follows.
    pub options: ServerOptions,
    /// Which models are loaded, and when.
    pub mode: ControlMode,
    /// What is loaded at start in mode `explicit`.
    pub load: Option<Vec<String>>,
    /// How often the disk is looked at in mode `poll`.
    pub poll: Duration,
    /// When devices are advised to be added or given back.
    pub autoscale: AutoscaleOptions,
    /// Whether they are.
    pub autoscale_enabled: bool,
}

impl Default for Draft {
    fn default() -> Self {
        Draft {
            options: ServerOptions::default(),
            mode: ControlMode::None,
            load: None,
            // As in Triton.
            poll: Duration::from_millis(15_000),
            autoscale: AutoscaleOptions::default(),
            autoscale_enabled: true,
        }
    }
}

downbeat_repository::named! {
    /// Triton's model control modes.
    ControlMode as "model control mode" {
        /// All models at start, no changes.
        None = "none",
        /// Models that are asked for.
        Explicit = "explicit",
        /// All models, and changes on disk are followed.
        Poll = "poll",
    }
}

impl Draft {
    /// The options.
    ///
    /// # Errors
    /// If models to load are named and the mode is not `explicit`.
    pub fn finish(mut self) -> anyhow::Result<ServerOptions> {
        if self.load.is_some() && self.mode != ControlMode::Explicit {
            anyhow::bail!(
                "--load-model (or `load` in [model_control]) needs the mode explicit, and the mode is {}; add \
                 --model-control-mode explicit, with which clients may load and unload models as well",
                self.mode
            );
        }
        self.options.model_control = match self.mode {
            ControlMode::None => ModelControl::None,
            ControlMode::Explicit => ModelControl::Explicit { load: self.load.unwrap_or_default() },
            ControlMode::Poll => ModelControl::Poll { every: self.poll },
        };
        self.options.autoscale = self.autoscale_enabled.then_some(self.autoscale);
        Ok(self.options)
    }
}
