//! The need of a request: the scope, the API and the model that it uses.

use std::fmt;

use downbeat_service::options::Api;

/// A right of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Everybody has it: liveness and readiness of the server, and the description of the paths.
    #[serde(skip)]
    Open,
    /// Inferences.
    Infer,
    /// Everything that changes nothing: metadata, statistics, metrics.
    Read,
    /// Everything else: models, shares, settings, shared memory.
    Manage,
}

impl Scope {
    /// The scopes of keys.
    pub const OF_KEYS: [Scope; 3] = [Scope::Infer, Scope::Read, Scope::Manage];

    /// The scope's name in the file of keys.
    pub fn name(self) -> &'static str {
        match self {
            Scope::Open => "open",
            Scope::Infer => "infer",
            Scope::Read => "read",
            Scope::Manage => "manage",
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Scope {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Scope::OF_KEYS.into_iter().find(|scope| scope.name() == text);
        found.ok_or_else(|| format!("'{text}' is no scope; expected infer, read or manage"))
    }
}

/// The need of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Need<'a> {
    /// The right that the request takes.
    pub scope: Scope,
    /// Its group among Triton's.
    pub api: Api,
    /// The models that it shows or changes.
    pub models: Models<'a>,
}

/// The models of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Models<'a> {
    /// The one that the route names.
    One(&'a str),
    /// All of them, or the whole server: not for a key of some models.
    All,
    /// None, or those that its handler checks or leaves out.
    Checked,
}
