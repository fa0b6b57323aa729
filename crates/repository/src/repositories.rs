//! Several model repositories that are served as one.

use std::path::{Path, PathBuf};

use crate::definition::ModelDefinition;
use crate::repository::{Fingerprint, ModelRepository, RepositoryError, Scan};

/// The model repositories of a server. A model may be in any of them; a model that is in two cannot
/// be served.
#[derive(Clone, Debug)]
pub struct ModelRepositories(Vec<ModelRepository>);

impl ModelRepositories {
    /// The repositories at `paths`. A repository with two paths counts once.
    ///
    /// # Errors
    /// If a path is not a readable folder.
    pub fn open(paths: &[PathBuf]) -> Result<Self, RepositoryError> {
        let mut repositories: Vec<ModelRepository> = Vec::new();
        for path in paths {
            let repository = ModelRepository::open(path)?;
            if repositories.iter().all(|known| known.root() != repository.root()) {
                repositories.push(repository);
            }
        }
        Ok(ModelRepositories(repositories))
    }

    /// The same repositories, each changed by `change`.
    #[must_use]
    pub fn map(self, change: impl Fn(ModelRepository) -> ModelRepository) -> Self {
        ModelRepositories(self.0.into_iter().map(change).collect())
    }

    /// Another folder, read by the same rules: the files of a load request.
    ///
    /// # Errors
    /// As [`ModelRepository::open`].
    pub fn at(&self, path: impl Into<PathBuf>) -> Result<ModelRepository, RepositoryError> {
        match self.0.first() {
            Some(repository) => repository.at(path),
            None => ModelRepository::open(path),
        }
    }

    /// The folders, as they were given.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.iter().map(ModelRepository::path)
    }

    /// The models of all repositories, each name once, and warnings.
    ///
    /// # Errors
    /// If a folder cannot be read any more.
    pub fn scan(&self) -> Result<Scan, RepositoryError> {
        let mut all = Scan::default();
        for repository in &self.0 {
            let Scan { names, warnings } = repository.scan()?;
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
        self.0.iter().any(|repository| repository.has(name))
    }

    /// As [`ModelRepository::definition`], in the repository that has the model.
    ///
    /// # Errors
    /// As [`ModelRepository::definition`]; also if two repositories have the model.
    pub fn definition(&self, name: &str, config: Option<&str>) -> Result<ModelDefinition, RepositoryError> {
        self.of(name)?.definition(name, config)
    }

    /// As [`ModelRepository::fingerprint`], of all folders of that name.
    pub fn fingerprint(&self, name: &str) -> Fingerprint {
        self.0.iter().map(|repository| repository.fingerprint(name)).collect()
    }

    /// The repository that has a model; otherwise one with an entry of this name; otherwise the
    /// first.
    fn of(&self, name: &str) -> Result<&ModelRepository, RepositoryError> {
        let mut having = self.0.iter().filter(|repository| repository.has(name));
        // This folder has the right name but is no model: its repository explains why.
        let near = self.0.iter().find(|repository| repository.has_entry(name));
        match (having.next(), having.next(), near.or(self.0.first())) {
            (Some(one), Some(other), _) => {
                let (one, other) = (one.path().to_owned(), other.path().to_owned());
                Err(RepositoryError::Ambiguous(name.to_owned(), one, other))
            }
            (Some(one), None, _) | (None, _, Some(one)) => Ok(one),
            (None, _, None) => Err(RepositoryError::NotFound(name.to_owned(), PathBuf::new(), String::new())),
        }
    }
}
