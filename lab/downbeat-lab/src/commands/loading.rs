//! The flags of commands that run real models.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use downbeat::{engine_choice, engine_for, open_repository};
use downbeat_engine::Engine;
use downbeat_engine_ort::Search;
use downbeat_repository::{ModelFormat, ModelRepository};
use downbeat_service::options::EngineChoice;

/// Flags of commands that run real models.
#[derive(Args, Debug)]
pub struct Loading {
    /// Engine for ONNX models: auto, cuda, tensorrt, onnxruntime, rten or emulated.
    #[arg(long, value_name = "ENGINE", env = "DOWNBEAT_ENGINE", default_value = "auto", value_parser = engine_choice(), hide_possible_values = true)]
    engine: EngineChoice,

    /// The model repository [default: `repository` of ./downbeat.toml, or else examples/models].
    #[arg(long, value_name = "REPOSITORY", env = "DOWNBEAT_MODEL_REPOSITORY")]
    repository: Option<PathBuf>,
}

impl Loading {
    /// Opens the repository with this model.
    ///
    /// # Errors
    /// If `downbeat.toml` or the repository cannot be read.
    pub fn repository(&self, model: &str) -> anyhow::Result<ModelRepository> {
        open_repository(model, self.repository.as_deref(), &std::env::current_dir()?)
    }

    /// Returns the engine for models of this format.
    ///
    /// # Errors
    /// If the engine cannot be used.
    pub fn engine(&self, format: ModelFormat, threads: usize) -> anyhow::Result<Arc<dyn Engine>> {
        engine_for(format, self.engine, &Search { threads, ..Search::from_env() })
    }
}
