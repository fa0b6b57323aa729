//! Several model repositories that are served as one.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use crate::definition::ModelDefinition;
use crate::repository::{Fingerprint, ModelRepository, RepositoryError, Scan};
use crate::source::{ModelSource, Origin, Supply, SupplyError};

/// The model repositories of a server. A model may be in any of them; a model that is in two cannot
/// be served. A clone has the same repositories.
#[derive(Clone, Debug)]
pub struct ModelRepositories(Vec<Sourced>);

/// A repository, and the supply that brings its models.
#[derive(Clone, Debug)]
struct Sourced {
    supply: Option<Arc<dyn Supply>>,
    /// Another path after each change that the supply brings.
    current: Arc<RwLock<ModelRepository>>,
}

impl Sourced {
    /// The repository of a source. The supply brings its models first.
    fn open(source: &ModelSource) -> Result<Self, RepositoryError> {
        let (supply, path) = match &source.origin {
            Origin::Path(path) => (None, path.clone()),
            Origin::Address(address) => {
                let message = "this server brings no models from other machines".to_owned();
                return Err(RepositoryError::NotBrought(address.clone(), SupplyError { message }));
            }
            Origin::Supply(supply) => (Some(supply.clone()), brought(&**supply)?),
        };
        if let Some(name) = &source.name {
            ModelRepository::check_name(name)?;
        }
        let repository = ModelRepository::open(path)?.with_name(source.name.clone());
        Ok(Sourced { supply, current: Arc::new(RwLock::new(repository)) })
    }

    fn now(&self) -> ModelRepository {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Has the supply look for changes.
    fn refresh(&self) -> Result<(), RepositoryError> {
        let Some(supply) = &self.supply else { return Ok(()) };
        let moved = self.now().moved_to(brought(&**supply)?)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = moved;
        Ok(())
    }
}

fn brought(supply: &dyn Supply) -> Result<PathBuf, RepositoryError> {
    supply.bring().map_err(|error| RepositoryError::NotBrought(supply.address().to_owned(), error))
}

impl ModelRepositories {
    /// The repositories of these sources. Supplies bring their models. A repository with two paths
    /// counts once.
    ///
    /// # Errors
    /// If a path is neither a readable folder nor a model file, or models cannot be brought.
    pub fn open(sources: &[ModelSource]) -> Result<Self, RepositoryError> {
        let mut repositories: Vec<Sourced> = Vec::new();
        for source in sources {
            let new = Sourced::open(source)?;
            if repositories.iter().all(|known| !known.now().is_same(&new.now())) {
                repositories.push(new);
            }
        }
        Ok(ModelRepositories(repositories))
    }

    /// The same repositories, each changed by `change`.
    #[must_use]
    pub fn map(self, change: impl Fn(ModelRepository) -> ModelRepository) -> Self {
        let changed = |sourced: Sourced| {
            let current = Arc::new(RwLock::new(change(sourced.now())));
            Sourced { current, ..sourced }
        };
        ModelRepositories(self.0.into_iter().map(changed).collect())
    }

    /// Another folder, read by the same rules: the files of a load request.
    ///
    /// # Errors
    /// As [`ModelRepository::open`].
    pub fn at(&self, path: impl Into<PathBuf>) -> Result<ModelRepository, RepositoryError> {
        match self.0.first() {
            Some(repository) => repository.now().at(path),
            None => ModelRepository::open(path),
        }
    }

    /// The folders and files, as they were given.
    pub fn paths(&self) -> impl Iterator<Item = PathBuf> {
        self.0.iter().map(|sourced| sourced.now().path().to_owned())
    }

    /// Whether a supply brings any of the models.
    pub fn has_supplies(&self) -> bool {
        self.0.iter().any(|sourced| sourced.supply.is_some())
    }

    /// Has supplies look for changes: all of them, or only the supply that has the model `name`. This
    /// takes as long as the network does. Returns the errors; models of such a supply stay as they
    /// are.
    pub fn refresh(&self, name: Option<&str>) -> Vec<RepositoryError> {
        let having: Vec<&Sourced> =
            self.0.iter().filter(|sourced| name.is_some_and(|name| sourced.now().has(name))).collect();
        let all: Vec<&Sourced> = if having.is_empty() { self.0.iter().collect() } else { having };
        all.into_iter().filter_map(|sourced| sourced.refresh().err()).collect()
    }

    /// The models of all repositories, each name once, and warnings.
    ///
    /// # Errors
    /// If a folder cannot be read any more.
    pub fn scan(&self) -> Result<Scan, RepositoryError> {
        let mut all = Scan::default();
        for repository in &self.0 {
            let Scan { names, warnings } = repository.now().scan()?;
            all.names.extend(names);
            all.warnings.extend(warnings);
        }
        all.names.sort_unstable();
        all.names.dedup();
        Ok(all)
    }

    /// Names of the models, sorted.
    ///
    /// # Errors
    /// As [`ModelRepositories::scan`].
    pub fn names(&self) -> Result<Vec<String>, RepositoryError> {
        self.scan().map(|scan| scan.names)
    }

    /// Whether a repository has a model of this name, with or without a configuration.
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|repository| repository.now().has(name))
    }

    /// As [`ModelRepository::definition`], in the repository that has the model.
    ///
    /// # Errors
    /// As [`ModelRepository::definition`]; also if two repositories have the model.
    pub fn definition(&self, name: &str, config: Option<&str>) -> Result<ModelDefinition, RepositoryError> {
        self.of(name)?.definition(name, config)
    }

    /// As [`ModelRepository::models_of_steps`], in the repository that has the model.
    pub fn models_of_steps(&self, name: &str, config: Option<&str>) -> BTreeSet<String> {
        self.of(name).map(|repository| repository.models_of_steps(name, config)).unwrap_or_default()
    }

    /// As [`ModelRepository::fingerprint`], of all models of that name.
    pub fn fingerprint(&self, name: &str) -> Fingerprint {
        let of = |(at, sourced): (usize, &Sourced)| sourced.now().fingerprint(name).below(&at.to_string());
        self.0.iter().enumerate().map(of).collect()
    }

    /// The repository that has a model; otherwise one with an entry of this name; otherwise the
    /// first.
    fn of(&self, name: &str) -> Result<ModelRepository, RepositoryError> {
        let mut all: Vec<ModelRepository> = self.0.iter().map(Sourced::now).collect();
        let having: Vec<usize> = all.iter().enumerate().filter(|(_, r)| r.has(name)).map(|(at, _)| at).collect();
        // This folder has the right name but is no model: its repository explains why.
        let near = || all.iter().position(|repository| repository.has_entry(name));
        match having[..] {
            [one, other, ..] => {
                let (one, other) = (all[one].path().to_owned(), all[other].path().to_owned());
                Err(RepositoryError::Ambiguous(name.to_owned(), one, other))
            }
            [one] => Ok(all.swap_remove(one)),
            [] if all.is_empty() => Err(RepositoryError::NotFound(name.to_owned(), PathBuf::new(), String::new())),
            [] => {
                let at = near().unwrap_or(0);
                Ok(all.swap_remove(at))
            }
        }
    }
}
