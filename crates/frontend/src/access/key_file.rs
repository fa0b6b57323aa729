//! The file of API keys: hashes, and the rights of each key.
//!
//! ```toml
//! [keys.web]
//! hash = "sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
//! scopes = ["infer"]
//! models = ["resnet50", "bert-*"]
//! requests_per_second = 100
//! tenant = "search"
//!
//! [tenants.search]
//! share = 0.5
//! ```
//!
//! A key is 256 random bits behind its name, so that no one guesses it from its hash.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, bail};
use downbeat_core::tenants::TenantPart;
use downbeat_service::budget::ByteBudget;
use downbeat_service::tenants::{NamedPart, OTHERS};
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

use super::need::Scope;
use super::rate::Rate;
use crate::own_file::{add_part, new_secret, text_of};
use crate::reloaded::read_bounded;

/// Largest file of keys, bytes.
const MAX_FILE: u64 = 4 << 20;
/// Most characters of a key's name.
const MAX_NAME: usize = 64;
const ALGORITHM: &str = "sha256:";
/// Shares that are written in tenths may add up to a little more than 1.
const ROUNDING: f64 = 1e-9;

type Hash = [u8; SHA256_OUTPUT_LEN];

/// The keys of a file, by name, and their tenants.
pub(super) struct Keys {
    keys: BTreeMap<String, Arc<Key>>,
    tenants: BTreeMap<String, Arc<Tenant>>,
}

/// A tenant: the keys that share a part of the devices' time, and a limit.
#[derive(Debug)]
pub(super) struct Tenant {
    pub name: String,
    share: f64,
    quota: Option<f64>,
    pub rate: Option<Rate>,
}

/// A key, and its rights.
#[derive(Debug)]
pub(super) struct Key {
    pub name: String,
    hash: Hash,
    scopes: Vec<Scope>,
    /// Names, and beginnings of names before a `*`; `None`: all models.
    models: Option<Vec<String>>,
    pub rate: Option<Rate>,
    /// Most bytes that the key's requests may hold together; `None`: the limit of all requests.
    bytes_in_flight: Option<u64>,
    budget: OnceLock<Arc<ByteBudget>>,
    pub tenant: Option<Arc<Tenant>>,
    /// Whether the file has tenants. Only then a request names its tenant.
    pub has_tenants: bool,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    keys: BTreeMap<String, Entry>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    tenants: BTreeMap<String, TenantEntry>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct TenantEntry {
    #[serde(default)]
    share: f64,
    quota: Option<f64>,
    requests_per_second: Option<f64>,
}

/// A missing limit is left out: TOML has no form for `None`, and its writer leaves such fields out.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    hash: String,
    scopes: Vec<Scope>,
    models: Option<Vec<String>>,
    requests_per_second: Option<f64>,
    bytes_in_flight: Option<u64>,
    tenant: Option<String>,
}

impl Tenant {
    fn of(name: &str, entry: &TenantEntry) -> anyhow::Result<Tenant> {
        check_name(name)?;
        if name == OTHERS {
            bail!("'{OTHERS}' is the name for all keys without a tenant; choose another name");
        }
        let TenantEntry { share, quota, requests_per_second } = *entry;
        if !(0.0..=1.0).contains(&share) {
            bail!("share is {share}; expected a part of the devices' time, from 0 to 1");
        }
        if let Some(quota) = quota
            && !(quota > 0.0 && quota <= 1.0 && quota >= share)
        {
            bail!("quota is {quota}; expected a part of the devices' time, at least the share ({share}) and at most 1");
        }
        check_rate(requests_per_second)?;
        Ok(Tenant { name: name.to_owned(), share, quota, rate: requests_per_second.map(Rate::new) })
    }
}

impl Keys {
    /// Reads a file of keys.
    pub fn read(file: &Path) -> anyhow::Result<Keys> {
        let shown = file.display();
        let text = String::from_utf8(read_bounded(file, MAX_FILE)?).with_context(|| format!("{shown} is not UTF-8"))?;
        let keys = Keys::parse(&text).with_context(|| format!("{shown} is no file of API keys"))?;
        if keys.keys.is_empty() {
            tracing::warn!(file = %shown, "the file has no API key, so no request is answered; downbeat key add makes one");
        }
        Ok(keys)
    }

    fn parse(text: &str) -> anyhow::Result<Keys> {
        let file: File = toml::from_str(text)?;
        let tenant = |(name, entry): (&String, &TenantEntry)| {
            let tenant = Tenant::of(name, entry).with_context(|| format!("tenant '{name}'"))?;
            Ok((name.clone(), Arc::new(tenant)))
        };
        let tenants: BTreeMap<_, _> = file.tenants.iter().map(tenant).collect::<anyhow::Result<_>>()?;
        let shares: f64 = tenants.values().map(|tenant| tenant.share).sum();
        if shares > 1.0 + ROUNDING {
            bail!("the shares of all tenants add up to {shares:.3}; they can be 1 at most, which is all device time");
        }
        let key = |(name, entry): (String, Entry)| {
            let key = Key::of(&name, entry, &tenants).with_context(|| format!("key '{name}'"))?;
            Ok((name, Arc::new(key)))
        };
        let keys = file.keys.into_iter().map(key).collect::<anyhow::Result<_>>()?;
        Ok(Keys { keys, tenants })
    }

    /// The tenants' parts of the devices' time.
    pub fn parts(&self) -> Vec<NamedPart> {
        let part = |tenant: &Arc<Tenant>| NamedPart {
            name: tenant.name.clone(),
            part: TenantPart { share: tenant.share, quota: tenant.quota },
        };
        self.tenants.values().map(part).collect()
    }

    /// The key that a request presents. The name is no secret; the comparison of the hash takes as
    /// long for every key.
    pub fn find(&self, presented: &[u8]) -> Option<Arc<Key>> {
        let name = presented.split(|byte| *byte == b'.').next()?;
        let key = self.keys.get(std::str::from_utf8(name).ok()?)?;
        bool::from(hash_of(presented).ct_eq(&key.hash)).then(|| Arc::clone(key))
    }
}

impl Key {
    fn of(name: &str, entry: Entry, tenants: &BTreeMap<String, Arc<Tenant>>) -> anyhow::Result<Key> {
        check_name(name)?;
        if entry.scopes.is_empty() {
            bail!("scopes is empty; expected infer, read or manage");
        }
        check_rate(entry.requests_per_second)?;
        let find = |tenant: String| {
            let found = tenants.get(&tenant).cloned();
            found.with_context(|| format!("the file has no tenant '{tenant}'; add the part [tenants.{tenant}]"))
        };
        Ok(Key {
            name: name.to_owned(),
            hash: parse_hash(&entry.hash)?,
            scopes: entry.scopes,
            models: entry.models,
            rate: entry.requests_per_second.map(Rate::new),
            bytes_in_flight: entry.bytes_in_flight,
            budget: OnceLock::new(),
            tenant: entry.tenant.map(find).transpose()?,
            has_tenants: !tenants.is_empty(),
        })
    }

    /// The budget of the key's requests, a part of that of all; `None`: the key has no limit.
    pub fn budget(&self, of_all: &Arc<ByteBudget>) -> Option<&Arc<ByteBudget>> {
        let limit = self.bytes_in_flight?;
        Some(self.budget.get_or_init(|| of_all.part(limit)))
    }

    /// Whether the key has a scope.
    pub fn has(&self, scope: Scope) -> bool {
        scope == Scope::Open || self.scopes.contains(&scope)
    }

    /// Whether the key is for all models.
    pub fn is_for_all(&self) -> bool {
        self.models.is_none()
    }

    /// Whether the key is for a model.
    pub fn may_use(&self, model: &str) -> bool {
        let is_of = |pattern: &String| match pattern.strip_suffix('*') {
            Some(beginning) => model.starts_with(beginning),
            None => model == pattern,
        };
        self.models.as_ref().is_none_or(|models| models.iter().any(is_of))
    }
}

fn check_rate(rate: Option<f64>) -> anyhow::Result<()> {
    match rate {
        Some(rate) if !(rate.is_finite() && rate > 0.0) => {
            bail!("requests_per_second is {rate}; expected a number above 0")
        }
        _ => Ok(()),
    }
}

fn check_name(name: &str) -> anyhow::Result<()> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(is_name) {
        bail!("a name has 1 to {MAX_NAME} letters, digits, - and _");
    }
    Ok(())
}

fn hash_of(key: &[u8]) -> Hash {
    let mut hash = Hash::default();
    hash.copy_from_slice(digest(&SHA256, key).as_ref());
    hash
}

fn parse_hash(text: &str) -> anyhow::Result<Hash> {
    let wrong = || format!("the hash is not {ALGORITHM} and 64 hexadecimal digits");
    let digits =
        text.strip_prefix(ALGORITHM).filter(|digits| digits.len() == 2 * SHA256_OUTPUT_LEN && digits.is_ascii());
    let digits = digits.with_context(wrong)?;
    let mut hash = Hash::default();
    for (byte, at) in hash.iter_mut().zip((0..).step_by(2)) {
        let pair = digits.get(at..at + 2).with_context(wrong)?;
        *byte = u8::from_str_radix(pair, 16).ok().filter(|_| !pair.starts_with('+')).with_context(wrong)?;
    }
    Ok(hash)
}

/// A key to be made.
#[derive(Clone, Debug)]
pub struct NewKey {
    /// The name of the key.
    pub name: String,
    /// The scopes of the key, at least one.
    pub scopes: Vec<Scope>,
    /// The models that the key is for; empty: all models.
    pub models: Vec<String>,
    /// Most requests a second; `None`: no limit.
    pub requests_per_second: Option<f64>,
    /// Most bytes in flight; `None`: no limit of its own.
    pub bytes_in_flight: Option<u64>,
    /// The tenant of the key, which the file must have; `None`: none.
    pub tenant: Option<String>,
}

/// Makes a key, adds its hash to a file, and returns the key. A file that does not exist is made, for
/// its owner alone.
///
/// # Errors
/// If the file is wrong or cannot be written, the name is taken or none, or a limit is none.
pub fn add_key(file: &Path, new: &NewKey) -> anyhow::Result<String> {
    let shown = file.display();
    let text = text_of(file, MAX_FILE)?;
    let present = Keys::parse(&text).with_context(|| format!("{shown} is no file of API keys"))?;
    if let Some(tenant) = &new.tenant
        && !present.tenants.contains_key(tenant)
    {
        bail!("{shown} has no tenant '{tenant}'; add the part [tenants.{tenant}] with its share first");
    }
    if present.keys.contains_key(&new.name) {
        bail!("{shown} has a key '{}' already; choose another name, or remove that key first", new.name);
    }
    let key = format!("{}.{}", new.name, new_secret()?);
    let part = part_of(new, &hash_of(key.as_bytes()))?;
    let gap = if text.is_empty() { "" } else { "\n" };
    // The file must stay one that the server reads.
    add_part(file, &text, &format!("{gap}{part}"), |text| Keys::parse(text).map(drop))?;
    Ok(key)
}

/// The part of a file with a key.
fn part_of(new: &NewKey, hash: &Hash) -> anyhow::Result<String> {
    let digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    let entry = Entry {
        hash: format!("{ALGORITHM}{digits}"),
        scopes: new.scopes.clone(),
        models: Some(new.models.clone()).filter(|models| !models.is_empty()),
        requests_per_second: new.requests_per_second,
        bytes_in_flight: new.bytes_in_flight,
        tenant: new.tenant.clone(),
    };
    Ok(toml::to_string(&File { keys: [(new.name.clone(), entry)].into(), tenants: BTreeMap::new() })?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn new(name: &str) -> NewKey {
        let (models, name) = (Vec::new(), name.to_owned());
        let scopes = vec![Scope::Infer];
        NewKey { name, scopes, models, requests_per_second: None, bytes_in_flight: None, tenant: None }
    }

    fn error(text: &str) -> String {
        format!("{:#}", Keys::parse(text).err().unwrap())
    }

    #[test]
    fn added_keys_are_found_and_others_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys.toml");
        let web = add_key(&file, &new("web")).unwrap();
        let limited =
            NewKey { models: vec!["a\"b".into(), "bert-*".into()], requests_per_second: Some(2.0), ..new("app") };
        let app = add_key(&file, &limited).unwrap();
        let keys = Keys::read(&file).unwrap();
        let found = keys.find(web.as_bytes()).unwrap();
        assert_eq!((found.name.as_str(), found.has(Scope::Infer), found.has(Scope::Manage)), ("web", true, false));
        assert!(found.may_use("anything"));
        let found = keys.find(app.as_bytes()).unwrap();
        assert!(found.may_use("a\"b") && found.may_use("bert-large") && !found.may_use("bert") && found.rate.is_some());
        let swapped = format!("app.{}", web.split_once('.').unwrap().1);
        for wrong in [swapped.as_str(), "web", "web.", "", ".", &format!("{web}x"), &web[..web.len() - 1], "none.x"] {
            assert!(keys.find(wrong.as_bytes()).is_none(), "{wrong}");
        }
        assert!(keys.find(&[0xff, b'.', 1]).is_none());
        assert!(!fs::read_to_string(&file).unwrap().contains(web.split_once('.').unwrap().1), "only hashes are kept");
        let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&file).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);
        assert!(add_key(&file, &new("web")).unwrap_err().to_string().contains("already"));
    }

    #[test]
    fn a_file_that_was_written_by_hand_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys.toml");
        fs::write(&file, "# mine").unwrap();
        add_key(&file, &new("web")).unwrap();
        assert!(fs::read_to_string(&file).unwrap().starts_with("# mine\n\n[keys.web]\n"));
        fs::write(&file, "nonsense").unwrap();
        assert!(add_key(&file, &new("web")).is_err());
        assert_eq!(fs::read_to_string(&file).unwrap(), "nonsense");
    }

    #[test]
    fn wrong_entries_are_errors_that_name_the_key() {
        let hash = format!("hash = \"sha256:{}\"", "0".repeat(64));
        assert!(error(&format!("[keys.a]\n{hash}\nscopes = []")).contains("key 'a': scopes is empty"));
        assert!(error(&format!("[keys.a]\n{hash}\nscopes = ['all']")).contains("infer"));
        assert!(error(&format!("[keys.a]\n{hash}\nscopes = ['open']")).contains("open"));
        assert!(error(&format!("[keys.a]\n{hash}\nscopes = ['read']\nmodel = 'x'")).contains("model"));
        assert!(error("[keys.a]\nhash = 'secret'\nscopes = ['read']").contains("64 hexadecimal digits"));
        assert!(error(&format!("[keys.a]\nhash = 'sha256:{}'\nscopes = ['read']", "+0".repeat(32))).contains("64"));
        assert!(error(&format!("[keys.'a b']\n{hash}\nscopes = ['read']")).contains("letters"));
        let rate = format!("[keys.a]\n{hash}\nscopes = ['read']\nrequests_per_second = ");
        assert!(error(&format!("{rate}0.0")).contains("above 0") && error(&format!("{rate}nan")).contains("above 0"));
    }

    #[test]
    fn keys_of_tenants_share_a_part() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys.toml");
        fs::write(&file, "[tenants.search]\nshare = 0.5\nquota = 0.75\n\n[tenants.ads]\nshare = 0.5\n").unwrap();
        let web = add_key(&file, &NewKey { tenant: Some("search".into()), ..new("web") }).unwrap();
        let app = add_key(&file, &new("app")).unwrap();
        let keys = Keys::read(&file).unwrap();
        let tenant = |key: &str| keys.find(key.as_bytes()).unwrap().tenant.as_ref().map(|tenant| tenant.name.clone());
        assert_eq!((tenant(&web).as_deref(), tenant(&app)), (Some("search"), None));
        let parts = keys.parts();
        assert_eq!(parts.iter().map(|part| part.name.as_str()).collect::<Vec<_>>(), ["ads", "search"]);
        assert_eq!(parts[1].part, TenantPart { share: 0.5, quota: Some(0.75) });
        let unknown = add_key(&file, &NewKey { tenant: Some("none".into()), ..new("x") }).unwrap_err().to_string();
        assert!(unknown.contains("[tenants.none]"), "{unknown}");
    }

    #[test]
    fn wrong_tenants_are_errors_that_name_the_tenant() {
        let many = "[tenants.a]\nshare = 0.7\n[tenants.b]\nshare = 0.4";
        assert!(error(many).contains("add up to 1.100"), "{}", error(many));
        let tenths: String = (0..10).map(|tenant| format!("[tenants.t{tenant}]\nshare = 0.1\n")).collect();
        assert!(Keys::parse(&tenths).is_ok());
        assert!(error("[tenants.a]\nshare = nan").contains("tenant 'a': share is NaN"));
        assert!(error("[tenants.a]\nshare = -0.1").contains("from 0 to 1"));
        assert!(error("[tenants.a]\nshare = 0.5\nquota = 0.4").contains("at least the share"));
        assert!(error("[tenants.a]\nrequests_per_second = 0.0").contains("above 0"));
        assert!(error("[tenants.others]\nshare = 0.1").contains("without a tenant"));
        assert!(error("[tenants.a]\nshares = 0.1").contains("shares"));
        let hash = format!("hash = \"sha256:{}\"", "0".repeat(64));
        assert!(error(&format!("[keys.k]\n{hash}\nscopes = ['read']\ntenant = 'a'")).contains("[tenants.a]"));
    }
}
