//! Sources of models: a path of this machine, or a supply that brings models from elsewhere.

use std::fmt::{self, Debug, Display};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::repository::ModelRepository;

/// A source of models, as a user gave it. Example: `cat=/mnt/models` serves the only model in
/// `/mnt/models` under the name `cat`.
#[derive(Clone, Debug)]
pub struct ModelSource {
    /// The name of the source's only model; `None`: names follow from the files.
    pub name: Option<String>,
    /// Where the models are.
    pub origin: Origin,
}

/// Where the models of a source are.
#[derive(Clone, Debug)]
pub enum Origin {
    /// A model file or a folder of this machine.
    Path(PathBuf),
    /// An address, for which nobody has made a supply.
    Address(String),
    /// Elsewhere: the supply brings the models.
    Supply(Arc<dyn Supply>),
}

/// Brings models from elsewhere to this machine.
pub trait Supply: Debug + Send + Sync {
    /// Looks for the present state of the models, and brings them. Returns a path of this machine,
    /// in one of the layouts of a [`ModelRepository`](crate::ModelRepository). Nobody changes the
    /// files at a path that was returned; changed models have another path.
    ///
    /// # Errors
    /// If the models cannot be brought. Earlier paths stay as they are.
    fn bring(&self) -> Result<PathBuf, SupplyError>;

    /// The address of the models, as the user gave it.
    fn address(&self) -> &str;
}

/// Why a supply could not bring models.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SupplyError {
    /// The fault, and its remedy.
    pub message: String,
}

impl Display for SupplyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for SupplyError {}

/// Sources are equal if they are written alike.
impl PartialEq for ModelSource {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl From<PathBuf> for ModelSource {
    fn from(path: PathBuf) -> Self {
        ModelSource { name: None, origin: Origin::Path(path) }
    }
}

impl From<&Path> for ModelSource {
    fn from(path: &Path) -> Self {
        path.to_owned().into()
    }
}

impl From<&str> for ModelSource {
    fn from(path: &str) -> Self {
        PathBuf::from(path).into()
    }
}

impl ModelSource {
    /// Splits `NAME=PLACE` as a command line has it. Without a name the whole text is the place; a
    /// text with a `/` before the first `=` has no name (`./a=b` is a path).
    pub fn split_name(text: &str) -> (Option<&str>, &str) {
        match text.split_once('=') {
            Some((name, place)) if !name.is_empty() && !place.is_empty() && !name.contains(['/', '\\']) => {
                (Some(name), place)
            }
            _ => (None, text),
        }
    }

    /// Reads a source as a user writes it; a path is relative to `folder`.
    ///
    /// # Errors
    /// If no model can have the name.
    pub fn parse(text: &str, folder: &Path) -> Result<Self, String> {
        let (name, place) = Self::split_name(text);
        if let Some(name) = name {
            ModelRepository::check_name(name).map_err(|error| error.to_string())?;
        }
        let origin = match place.split_once("://") {
            Some((scheme, path)) if scheme.eq_ignore_ascii_case("file") => Origin::Path(PathBuf::from(path)),
            Some((scheme, _)) if !scheme.contains(['/', '.']) => Origin::Address(place.to_owned()),
            _ => Origin::Path(folder.join(place)),
        };
        Ok(ModelSource { name: name.map(str::to_owned), origin })
    }

    /// The path, if the source is one of this machine.
    pub fn path(&self) -> Option<&Path> {
        match &self.origin {
            Origin::Path(path) => Some(path),
            Origin::Address(_) | Origin::Supply(_) => None,
        }
    }
}

impl Display for ModelSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.name {
            write!(f, "{name}=")?;
        }
        match &self.origin {
            Origin::Path(path) => Display::fmt(&path.display(), f),
            Origin::Address(address) => f.write_str(address),
            Origin::Supply(supply) => f.write_str(supply.address()),
        }
    }
}
