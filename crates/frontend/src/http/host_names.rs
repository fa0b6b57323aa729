//! Checks whether a page of another site sent a request, and by which name the request calls the
//! port.
//!
//! A browser sends requests for every page that it shows, also to servers that only its own machine
//! can reach. Three headers, which a page cannot write, tell these requests apart:
//!
//! - `Origin` and `Sec-Fetch-Site` tell that the page came from another site. Such a page may not
//!   change the server's state. The page could not read an answer: this server sends no CORS
//!   headers.
//! - `Host` tells the name by which the page reached the port. The owner of a name can let the name
//!   lead to any address (DNS rebinding). The browser then takes the page for one of this server.
//!   Therefore a port on a loopback address accepts known names only.
//!
//! gRPC needs no check: browsers speak HTTP/2 over TLS alone, which this server does not offer.

use std::net::{IpAddr, Ipv6Addr};

use axum::http::header::{HOST, HeaderName, ORIGIN};
use axum::http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use downbeat_core::pages::Pointer;
use tokio::net::TcpListener;

use super::answer::HttpError;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// The schemes of pages, and the ports that a host without a port has under them.
const SCHEMES: [(&[u8], &[u8]); 2] = [(b"http://", b":80"), (b"https://", b":443")];

/// The names that requests to a port may have in `Host`.
pub(super) struct HostNames {
    /// Whether hosts are checked: the address is a loopback address, or the options give names.
    is_checked: bool,
    /// The allowed names, in lower case.
    allowed: Vec<String>,
}

impl HostNames {
    /// The names of the port of `listener`.
    pub fn of(listener: &TcpListener, allowed: &[String]) -> Self {
        let is_loopback = listener.local_addr().map_or(true, |address| is_loopback(address.ip()));
        HostNames { is_checked: is_loopback || !allowed.is_empty(), allowed: allowed.to_vec() }
    }

    /// Checks the head of a request. Every port calls this before the request is routed, so no
    /// route can forget it.
    ///
    /// # Errors
    /// The error answer to a request that is not allowed.
    pub fn check<B>(&self, request: &Request<B>) -> Result<(), HttpError> {
        let host = host_of(request)?;
        if self.is_checked && !self.allows(host) {
            return Err(refused(format!(
                "Host is '{}', but this port accepts only localhost, IP addresses and the names of --allow-host. If \
                 this is a name of the server, start the server with --allow-host NAME ({})",
                host.escape_ascii(),
                Pointer::HOSTS
            )));
        }
        if changes_state(request.method(), request.uri().path()) {
            check_site(host, request.headers())?;
        }
        Ok(())
    }

    fn allows(&self, host: &[u8]) -> bool {
        let name = without_port(host);
        let name = name.strip_suffix(b".").unwrap_or(name);
        // A program that names no host is no browser.
        host.is_empty()
            || is_address(name)
            || name.eq_ignore_ascii_case(b"localhost")
            || self.allowed.iter().any(|allowed| name.eq_ignore_ascii_case(allowed.as_bytes()))
    }
}

fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

fn refused(message: String) -> HttpError {
    HttpError::new(StatusCode::FORBIDDEN, message).closing()
}

/// The host that a request names, with its port; empty if it names none.
fn host_of<B>(request: &Request<B>) -> Result<&[u8], HttpError> {
    let mut hosts = request.headers().get_all(HOST).iter();
    let host = hosts.next();
    if hosts.next().is_some() {
        let message = "the request has several Host headers; expected one".to_owned();
        return Err(HttpError::new(StatusCode::BAD_REQUEST, message).closing());
    }
    // If the target of a request is a whole URI, it wins over the header (RFC 9112 §3.2.2).
    let target = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    Ok(target.or(host.map(|host| host.as_bytes())).unwrap_or_default())
}

/// A host without its port; the whole text if it ends in no port.
fn without_port(host: &[u8]) -> &[u8] {
    let Some(colon) = host.iter().rposition(|byte| *byte == b':') else { return host };
    match host.split_at(colon) {
        (name, [_, port @ ..]) if port.iter().all(u8::is_ascii_digit) => name,
        _ => host,
    }
}

/// Whether a host is an IP address. No name's last part is a number (RFC 3696 §2), so browsers take
/// `127.1` for an address and look up no name.
fn is_address(name: &[u8]) -> bool {
    if let [b'[', address @ .., b']'] = name {
        return std::str::from_utf8(address).is_ok_and(|address| address.parse::<Ipv6Addr>().is_ok());
    }
    let last = name.rsplit(|byte| *byte == b'.').next().unwrap_or_default();
    !last.is_empty() && last.iter().all(u8::is_ascii_digit)
}

/// Whether a request may change more than the work at hand: everything that is no read, but
/// inferences.
fn changes_state(method: &Method, path: &str) -> bool {
    let is_inference = || {
        *method == Method::POST
            && path.strip_prefix("/v2/models/").is_some_and(|rest| {
                let rest = rest.trim_end_matches('/');
                ["/infer", "/generate", "/generate_stream"].iter().any(|end| rest.ends_with(end))
            })
    };
    !(method.is_safe() || is_inference())
}

/// Refuses a request that a browser sent for a page of another site.
fn check_site(host: &[u8], headers: &HeaderMap) -> Result<(), HttpError> {
    // Pages of the same site have another port or another first part of the name: `localhost:3000`
    // is no page of this server.
    let is_foreign = |site: &&HeaderValue| {
        [&b"cross-site"[..], b"same-site"].iter().any(|foreign| site.as_bytes().eq_ignore_ascii_case(foreign))
    };
    if let Some(site) = headers.get_all(SEC_FETCH_SITE).iter().find(is_foreign) {
        return Err(foreign("Sec-Fetch-Site", site.as_bytes()));
    }
    match headers.get_all(ORIGIN).iter().find(|origin| !is_own(origin.as_bytes(), host)) {
        Some(origin) => Err(foreign("Origin", origin.as_bytes())),
        None => Ok(()),
    }
}

fn foreign(header: &str, value: &[u8]) -> HttpError {
    refused(format!(
        "{header} is '{}': a web page of another origin sent this request, which may change the server's state. Only \
         programs, and pages of the server's own host and port, may send such requests ({})",
        value.escape_ascii(),
        Pointer::HOSTS
    ))
}

/// Whether an origin is that of the host to which its page sends. The scheme is not compared: a
/// proxy may end TLS.
fn is_own(origin: &[u8], host: &[u8]) -> bool {
    SCHEMES.iter().any(|(scheme, port)| {
        let bare = |host: &'_ [u8]| host.strip_suffix(*port).unwrap_or(host).to_ascii_lowercase();
        origin.strip_prefix(*scheme).is_some_and(|origin| !origin.is_empty() && bare(origin) == bare(host))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(is_checked: bool, allowed: &[&str]) -> HostNames {
        HostNames { is_checked, allowed: allowed.iter().map(|name| (*name).to_owned()).collect() }
    }

    #[test]
    fn names_that_their_owners_can_move_are_not_taken() {
        let own = names(true, &["models.example.com"]);
        let taken = [
            "localhost",
            "LOCALHOST:8000",
            "localhost.",
            "127.0.0.1:1",
            "127.1",
            "[::1]:8000",
            "[::1]",
            "",
            "Models.Example.com:80",
        ];
        for host in taken {
            assert!(own.allows(host.as_bytes()), "{host}");
        }
        let others = [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:8000",
            "localhost:x",
            "[evil]",
            "[::1",
            "a@localhost",
            ".",
            ":80x",
            "xmodels.example.com",
        ];
        for host in others {
            assert!(!own.allows(host.as_bytes()), "{host}");
        }
    }

    #[test]
    fn an_origin_is_compared_by_host_and_port() {
        let own =
            [("http://a:8000", "a:8000"), ("https://A", "a:443"), ("http://a:80", "a"), ("http://[::1]:8", "[::1]:8")];
        for (origin, host) in own {
            assert!(is_own(origin.as_bytes(), host.as_bytes()), "{origin} {host}");
        }
        let foreign = [
            ("http://a:3000", "a:8000"),
            ("null", "a"),
            ("http://a.b", "a"),
            ("http://", ""),
            ("file://", ""),
            ("ftp://a", "a"),
            ("http://a", ""),
        ];
        for (origin, host) in foreign {
            assert!(!is_own(origin.as_bytes(), host.as_bytes()), "{origin} {host}");
        }
    }

    #[test]
    fn only_reads_and_inferences_change_nothing() {
        let changes = |method: &str, path: &str| changes_state(&method.parse().unwrap(), path);
        assert!(!changes("GET", "/v2/logging") && !changes("HEAD", "/") && !changes("OPTIONS", "/v2"));
        assert!(!changes("POST", "/v2/models/m/generate") && !changes("POST", "/v2/models/m/generate_stream/"));
        assert!(!changes("POST", "/v2/models/m/infer") && !changes("POST", "/v2/models/m/versions/1/infer/"));
        assert!(changes("PUT", "/v2/models/m/infer") && changes("POST", "/v2/models/m/trace/setting"));
        assert!(changes("POST", "/v2/cluster/plan") && changes("DELETE", "/anything") && changes("BREW", "/"));
    }
}
