//! Which engine runs the models: by name, or the fastest that is there.

use std::str::FromStr;
use std::sync::Arc;

use crate::emulated::{self, Emulated};
use crate::onnxruntime::{self, FindError, Onnxruntime, Search};
use crate::rten::{self, Rten};
use crate::traits::{Engine, EngineInfo};

/// Which engine is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preference {
    /// `onnxruntime` if it is found, else `rten`.
    #[default]
    Auto,
    /// `onnxruntime`, or none.
    Onnxruntime,
    /// `rten`.
    Rten,
    /// `emulated`.
    Emulated,
}

impl Preference {
    /// What a person may write.
    pub const NAMES: [&str; 4] = ["auto", onnxruntime::NAME, rten::NAME, emulated::NAME];
}

/// A name that is none of [`Preference::NAMES`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown engine '{0}'; expected one of {names}", names = Preference::NAMES.join(", "))]
pub struct UnknownEngine(pub String);

impl FromStr for Preference {
    type Err = UnknownEngine;

    fn from_str(s: &str) -> Result<Self, UnknownEngine> {
        match s {
            "auto" => Ok(Preference::Auto),
            onnxruntime::NAME => Ok(Preference::Onnxruntime),
            rten::NAME => Ok(Preference::Rten),
            emulated::NAME => Ok(Preference::Emulated),
            other => Err(UnknownEngine(other.chars().take(64).collect())),
        }
    }
}

/// The engine to use.
pub struct Choice {
    /// The engine.
    pub engine: Arc<dyn Engine>,
    /// One line for the person who started it, if there is a faster engine to have or one was passed over.
    pub hint: Option<String>,
}

/// Why there is no engine as wanted.
#[derive(Debug, thiserror::Error)]
pub enum ChooseError {
    /// A library is there, but cannot be used.
    #[error(transparent)]
    Find(#[from] FindError),
    /// No library is there.
    #[error(
        "no onnxruntime library found. Run `downbeat engine install`, or set ORT_DYLIB_PATH to libonnxruntime.so, or use the engine rten"
    )]
    NotFound,
}

/// The engine for `preference`.
///
/// # Errors
/// If `onnxruntime` is wanted and there is none, or if the one that `search.asked` names cannot be used.
pub fn choose(preference: Preference, search: &Search) -> Result<Choice, ChooseError> {
    let hint = |reason: &str| Some(format!("rten is the slower engine: {reason}"));
    let (engine, hint): (Arc<dyn Engine>, _) = match preference {
        Preference::Emulated => (Arc::new(Emulated::new()), None),
        Preference::Rten => (Arc::new(Rten::with_threads(search.threads)), None),
        Preference::Onnxruntime => (Arc::new(Onnxruntime::find(search)?.ok_or(ChooseError::NotFound)?), None),
        Preference::Auto => match Onnxruntime::find(search) {
            Ok(Some(engine)) => (Arc::new(engine), None),
            Ok(None) => (
                Arc::new(Rten::with_threads(search.threads)),
                hint("`downbeat engine install` fetches onnxruntime, 1.1 to 6 times as fast"),
            ),
            Err(e) if search.asked.is_some() => return Err(e.into()),
            Err(e) => (Arc::new(Rten::with_threads(search.threads)), hint(&e.to_string())),
        },
    };
    Ok(Choice { engine, hint })
}

/// The engines that can be used here, the fastest first.
pub fn available(search: &Search) -> Vec<EngineInfo> {
    let onnxruntime = Onnxruntime::find(search).ok().flatten().map(|e| e.info());
    onnxruntime.into_iter().chain([Rten::new().info(), Emulated::new().info()]).collect()
}
