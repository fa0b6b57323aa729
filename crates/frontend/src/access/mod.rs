//! Who may do what at the ports: API keys, Triton's restricted APIs, and limits.
//!
//! A request that comes to a port has a [`Need`]: a scope, one of Triton's APIs, and perhaps a model.
//! [`Access::admit_http`] and [`Access::admit_grpc`] decide by the request's headers and its sender's
//! address. The frontends derive the need from the route, never from the text of a path. A route
//! without a rule needs the scope `manage`.

mod addresses;
mod key_file;
mod need;
mod rate;
mod restricted;

use std::sync::{Arc, OnceLock};

use downbeat_core::pages::Pointer;
use downbeat_core::{Duration, Time};
use downbeat_protocol::{InferRequest, Parameter};
use downbeat_service::budget::ByteBudget;
use downbeat_service::client::Client;
use downbeat_service::clock::Clock;
use downbeat_service::error::ServiceError;
use downbeat_service::options::AccessOptions;
use downbeat_service::service::Service;
use downbeat_service::tenants::{NamedPart, OTHERS, TENANT};
use http::header::AUTHORIZATION;
use http::{HeaderMap, StatusCode};
use tonic::Status;

use addresses::Addresses;
pub use addresses::network;
use key_file::{Key, Keys};
use rate::Rate;
use restricted::Restricted;

pub use key_file::{NewKey, add_key};
pub use need::{Models, Need, Scope};

use crate::reloaded::Reloaded;

/// The rules of a process's ports.
pub struct Access {
    /// The keys; `None`: requests need none.
    keys: Option<Arc<Reloaded<Keys>>>,
    restricted: Restricted,
    addresses: Option<Addresses>,
    /// The port that alone takes requests that manage, if there is one.
    management_port: Option<u16>,
    /// The clock of the limits.
    clock: Clock,
    /// Takes the tenants' parts of the devices' time, once there is a service.
    takes_parts: TakesParts,
}

/// Takes the tenants' parts of the devices' time; empty until there is a service.
type TakesParts = Arc<OnceLock<Box<dyn Fn(&[NamedPart]) -> Result<(), ServiceError> + Send + Sync>>>;

/// The sender of an admitted request.
#[derive(Clone, Default)]
pub struct Caller(Option<Arc<Key>>);

/// Why a request is not admitted.
#[derive(Debug)]
pub enum Denied {
    /// The request has no key.
    NoKey,
    /// The request's key is none of the file.
    WrongKey,
    /// The key does not have the scope.
    Scope {
        /// The key's name.
        key: String,
        /// The scope that it lacks.
        scope: Scope,
    },
    /// The key is for other models.
    Model {
        /// The key's name.
        key: String,
        /// The model.
        model: String,
    },
    /// The key is for some models, and the request is about all of them.
    All {
        /// The key's name.
        key: String,
    },
    /// The API is restricted, and the request lacks its header.
    Restricted {
        /// The header.
        header: String,
    },
    /// Requests that manage come to another port.
    Elsewhere(u16),
    /// More requests than the key or the address may send.
    TooMany {
        /// The key or the address.
        sender: String,
        /// The limit.
        a_second: f64,
        /// The option or the part of the file with the limit.
        option: &'static str,
        /// When the next request may come.
        retry_after: Duration,
    },
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Access").field("management_port", &self.management_port).finish_non_exhaustive()
    }
}

impl Access {
    /// The rules of the options; `None`: everybody may do everything. A task on the caller's runtime
    /// follows the file of keys.
    ///
    /// # Errors
    /// If the file of keys cannot be read.
    pub fn open(options: &AccessOptions) -> anyhow::Result<Option<Arc<Access>>> {
        if *options == AccessOptions::default() {
            return Ok(None);
        }
        let takes_parts = TakesParts::default();
        let keys = options.keys.clone().map(|file| {
            let read = {
                let (file, takes_parts) = (file.clone(), takes_parts.clone());
                move || {
                    let keys = Keys::read(&file)?;
                    takes_parts.get().map_or(Ok(()), |take| take(&keys.parts()))?;
                    Ok(keys)
                }
            };
            Reloaded::follow("API keys", vec![file], read)
        });
        Ok(Some(Arc::new(Access {
            keys: keys.transpose()?,
            restricted: Restricted::of(options),
            addresses: options.requests_per_address.map(|rate| Addresses::new(rate.into())),
            management_port: options.management_port,
            clock: Clock::start(),
            takes_parts,
        })))
    }

    /// Tells a service the tenants' parts of the devices' time, now and whenever the file of keys
    /// changes.
    ///
    /// # Errors
    /// If the service cannot keep them.
    pub fn share_with<S: Service>(&self, service: Arc<S>) -> Result<(), ServiceError> {
        let Some(keys) = &self.keys else { return Ok(()) };
        service.set_tenants(&keys.get().parts())?;
        // The ports are answered once.
        let _ = self.takes_parts.set(Box::new(move |parts| service.set_tenants(parts)));
        Ok(())
    }

    /// The rules of the management port, which takes every request.
    pub fn of_management(&self) -> Arc<Access> {
        Arc::new(Access {
            keys: self.keys.clone(),
            restricted: self.restricted.clone(),
            addresses: None,
            management_port: None,
            clock: self.clock,
            takes_parts: self.takes_parts.clone(),
        })
    }

    /// Whether a request over HTTP with these headers may go on.
    ///
    /// # Errors
    /// Why not.
    pub fn admit_http(&self, client: Client, need: Need<'_>, headers: &HeaderMap) -> Result<Caller, Denied> {
        self.restricted.check_http(need.api, headers)?;
        self.admit(client, need, headers)
    }

    /// Whether a call over gRPC with this metadata may go on.
    ///
    /// # Errors
    /// Why not.
    pub fn admit_grpc(&self, client: Client, need: Need<'_>, headers: &HeaderMap) -> Result<Caller, Denied> {
        self.restricted.check_grpc(need.api, headers)?;
        self.admit(client, need, headers)
    }

    fn admit(&self, client: Client, need: Need<'_>, headers: &HeaderMap) -> Result<Caller, Denied> {
        if let (Scope::Manage, Some(port)) = (need.scope, self.management_port) {
            return Err(Denied::Elsewhere(port));
        }
        if need.scope == Scope::Open {
            return Ok(Caller::default());
        }
        let now = self.clock.now();
        if let (Some(addresses), Some(address)) = (&self.addresses, client.address()) {
            addresses.take(address, now)?;
        }
        let Some(keys) = &self.keys else { return Ok(Caller::default()) };
        let presented = headers.get(AUTHORIZATION).ok_or(Denied::NoKey)?;
        let key = keys.get().find(bearer(presented.as_bytes()).ok_or(Denied::NoKey)?).ok_or(Denied::WrongKey)?;
        if !key.has(need.scope) {
            return Err(Denied::Scope { key: key.name.clone(), scope: need.scope });
        }
        let caller = Caller(Some(key));
        match need.models {
            Models::One(model) => caller.check_model(model)?,
            Models::All => caller.check_all()?,
            Models::Checked => {}
        }
        caller.take(now)?;
        Ok(caller)
    }
}

/// The key in the value of `Authorization`: `Bearer KEY`.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
}

impl Caller {
    /// Checks that the sender may use a model.
    ///
    /// # Errors
    /// If the sender's key is for other models.
    pub fn check_model(&self, model: &str) -> Result<(), Denied> {
        match &self.0 {
            Some(key) if !key.may_use(model) => {
                Err(Denied::Model { key: key.name.clone(), model: model.chars().take(SHOWN_NAME).collect() })
            }
            _ => Ok(()),
        }
    }

    fn check_all(&self) -> Result<(), Denied> {
        match &self.0 {
            Some(key) if !key.is_for_all() => Err(Denied::All { key: key.name.clone() }),
            _ => Ok(()),
        }
    }

    /// Whether the sender may use some models only.
    pub fn is_limited(&self) -> bool {
        self.0.as_ref().is_some_and(|key| !key.is_for_all())
    }

    /// Whether the sender may know of a model.
    pub fn sees(&self, model: &str) -> bool {
        self.0.as_ref().is_none_or(|key| key.may_use(model))
    }

    /// The budget of the sender's requests: its key's, or `of_all`.
    pub fn budget<'a>(&'a self, of_all: &'a Arc<ByteBudget>) -> &'a Arc<ByteBudget> {
        self.0.as_ref().and_then(|key| key.budget(of_all)).unwrap_or(of_all)
    }

    /// Writes the sender's tenant into a request, in place of any that the client wrote.
    pub fn mark(&self, request: &mut InferRequest) {
        let Some(key) = &self.0 else { return };
        if key.has_tenants {
            let name = key.tenant.as_ref().map_or(OTHERS, |tenant| tenant.name.as_str());
            request.parameters.insert(TENANT.to_owned(), Parameter::String(name.to_owned()));
        }
    }

    fn take(&self, now: Time) -> Result<(), Denied> {
        let Some(key) = &self.0 else { return Ok(()) };
        if let Some(tenant) = &key.tenant
            && let Some(rate) = &tenant.rate
        {
            take(rate, now, || format!("tenant '{}'", tenant.name), "requests_per_second of the tenant")?;
        }
        match &key.rate {
            Some(rate) => take(rate, now, || format!("key '{}'", key.name), "requests_per_second of the key"),
            None => Ok(()),
        }
    }
}

fn take(rate: &Rate, now: Time, sender: impl Fn() -> String, option: &'static str) -> Result<(), Denied> {
    rate.take(now).map_err(|retry_after| {
        let (sender, a_second) = (sender(), rate.a_second());
        Denied::TooMany { sender, a_second, option, retry_after }
    })
}

/// Most characters of a name that a message repeats.
const SHOWN_NAME: usize = 128;

impl Denied {
    /// The status over HTTP.
    pub fn http_status(&self) -> StatusCode {
        match self {
            Denied::NoKey | Denied::WrongKey => StatusCode::UNAUTHORIZED,
            Denied::Scope { .. }
            | Denied::Model { .. }
            | Denied::All { .. }
            | Denied::Restricted { .. }
            | Denied::Elsewhere(_) => StatusCode::FORBIDDEN,
            Denied::TooMany { .. } => StatusCode::TOO_MANY_REQUESTS,
        }
    }

    /// Whole seconds after which the request may be sent again, if that can help.
    pub fn retry_after_seconds(&self) -> Option<u64> {
        match self {
            Denied::TooMany { retry_after, .. } => Some(retry_after.as_secs_f64().ceil().max(1.0) as u64),
            _ => None,
        }
    }
}

impl std::fmt::Display for Denied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let keys = Pointer::KEYS;
        match self {
            Denied::NoKey => {
                write!(f, "the request has no API key; send the header Authorization: Bearer KEY ({keys})")
            }
            Denied::WrongKey => write!(f, "the server does not know the request's API key ({keys})"),
            Denied::Scope { key, scope } => {
                write!(f, "key '{key}' does not have the scope '{scope}', which this request needs ({keys})")
            }
            Denied::Model { key, model } => write!(f, "key '{key}' is not for model '{model}' ({keys})"),
            Denied::All { key } => {
                write!(
                    f,
                    "key '{key}' is for some models, and this request is about all of them or the server ({keys})"
                )
            }
            Denied::Restricted { header } => write!(f, "This API is restricted, expecting header '{header}'"),
            Denied::Elsewhere(port) => {
                write!(
                    f,
                    "requests that change the server or its models come to the management port, {port}, over HTTP"
                )
            }
            Denied::TooMany { sender, a_second, option, .. } => {
                write!(f, "{sender} may send {a_second} requests a second ({option}); send fewer, or try again later")
            }
        }
    }
}

impl From<Denied> for Status {
    fn from(denied: Denied) -> Self {
        let message = denied.to_string();
        let mut status = match denied {
            Denied::NoKey | Denied::WrongKey => Status::unauthenticated(message),
            Denied::Scope { .. } | Denied::Model { .. } | Denied::All { .. } | Denied::Elsewhere(_) => {
                Status::permission_denied(message)
            }
            // Triton's code and words.
            Denied::Restricted { ref header } => {
                Status::unavailable(format!("This protocol is restricted, expecting header '{header}'"))
            }
            Denied::TooMany { .. } => Status::resource_exhausted(message),
        };
        if let Denied::TooMany { retry_after, .. } = denied
            && let Ok(millis) = (retry_after.as_nanos() / 1_000_000).max(1).to_string().parse()
        {
            status.metadata_mut().insert("grpc-retry-pushback-ms", millis);
        }
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_comes_as_a_bearer_token() {
        assert_eq!(bearer(b"Bearer web.abc"), Some(&b"web.abc"[..]));
        assert_eq!(bearer(b"bearer  web.abc "), Some(&b"web.abc"[..]));
        for other in [&b"Basic abc"[..], b"Bearer", b"", b"web.abc"] {
            assert_eq!(bearer(other), None, "{}", other.escape_ascii());
        }
    }
}
