//! The server's options while several sources set them.

use downbeat_core::Duration;
use downbeat_core::cluster::AutoscaleOptions;
use downbeat_service::options::{ModelControl, ServerOptions};

/// The options as sources set them one after another. A later source wins.
#[derive(Clone, Debug)]
pub struct Draft {
    /// All options without a field of their own below.
    pub options: ServerOptions,
    /// The model control mode.
    pub mode: ControlMode,
    /// The models to load at start in mode `explicit`.
    pub load: Option<Vec<String>>,
    /// The interval between looks at the disk in mode `poll`.
    pub poll: Duration,
    /// The rules for advice to add or give back devices.
    pub autoscale: AutoscaleOptions,
    /// Whether the server gives such advice.
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
        /// All models at start, without later changes.
        None = "none",
        /// Models that clients ask for.
        Explicit = "explicit",
        /// All models, and later changes on disk.
        Poll = "poll",
    }
}

impl Draft {
    /// The finished options.
    ///
    /// # Errors
    /// If models to load are named and the mode is not `explicit`.
    pub fn finish(mut self) -> anyhow::Result<ServerOptions> {
        if self.load.is_some() && self.mode != ControlMode::Explicit {
            anyhow::bail!(
                "--load-model (or `load` in [model_control]) needs the model control mode explicit, but the mode is \
                 {}; add --model-control-mode explicit (clients may then load and unload models as well)",
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
