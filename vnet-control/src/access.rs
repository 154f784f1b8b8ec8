//! Who may control the host by TCP: the keys of `[control]` beside the socket.
//!
//! The API is read-only without the token; the console knows no token, so that whoever reaches it may change everything. Either
//! may leave this host only under TLS, the console only for clients with a certificate.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::config::socket_address;
use super::table::{Reader, quote};

/// Where control listens by TCP, and what it asks of its clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The API, metrics and events.
    pub http: Option<SocketAddr>,
    /// The control language.
    pub console: Option<SocketAddr>,
    /// File with the token that changes by the API must show.
    pub token_file: Option<PathBuf>,
    /// TLS: this host's certificate.
    pub tls: Option<TlsFiles>,
    /// PEM file of the authority whose clients may use the console, which then speaks TLS.
    pub tls_client_ca: Option<PathBuf>,
}

/// PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, then its chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

impl Access {
    /// Takes the keys out of `[control]` and judges them together.
    pub(super) fn read(reader: &mut Reader<'_>) -> Access {
        let address = |reader: &mut Reader<'_>, key| {
            let (place, text) = reader.text(key)?;
            let address = socket_address(reader, key, (place.clone(), text))?;
            Some((place, address))
        };
        let http = address(reader, "http");
        let console = address(reader, "console");
        let token_file = path(reader, "token_file");
        let cert = path(reader, "tls_cert");
        let key = path(reader, "tls_key");
        let tls_client_ca = path(reader, "tls_client_ca");
        if cert.is_some() != key.is_some() {
            let place = reader.place_of(if cert.is_some() { "tls_cert" } else { "tls_key" });
            reader.problem(&place, "tls_cert and tls_key belong together; name both files, or neither");
        }
        let tls = cert.zip(key).map(|(cert, key)| TlsFiles { cert, key });
        if let Some((place, address)) = &http
            && !address.ip().is_loopback()
            && tls.is_none()
        {
            let text = format!(
                "http {address} can be reached from other hosts in clear text; write 127.0.0.1:{}, or name \
                 tls_cert and tls_key",
                address.port()
            );
            reader.problem(place, text);
        }
        if tls_client_ca.is_some() && tls.is_none() {
            let place = reader.place();
            reader.problem(&place, "tls_client_ca asks for TLS; name tls_cert and tls_key, too");
        }
        if let Some((place, address)) = &console
            && !address.ip().is_loopback()
            && tls_client_ca.is_none()
        {
            let text = format!(
                "console {address} can be reached from other hosts by everybody; write 127.0.0.1:{}, or name tls_cert, \
                 tls_key and tls_client_ca",
                address.port()
            );
            reader.problem(place, text);
        }
        if let (Some((_, http)), Some((place, console))) = (&http, &console)
            && http == console
            && http.port() != 0
        {
            reader.problem(place, format!("http and console are both at {console}; choose another port"));
        }
        let (http, console) = (http.map(|(_, http)| http), console.map(|(_, console)| console));
        Access { http, console, token_file, tls, tls_client_ca }
    }
}

/// An absolute path.
fn path(reader: &mut Reader<'_>, key: &'static str) -> Option<PathBuf> {
    let (place, path) = reader.text(key)?;
    if path.starts_with('/') && !path.contains('\0') {
        return Some(path.into());
    }
    reader.problem(
        &place,
        format!("{key} {} is not an absolute path of a file; begin it with '/'", quote(&path)),
    );
    None
}

#[cfg(test)]
mod tests {
    use crate::config;

    fn errors(control: &str) -> Vec<String> {
        let text = format!("[host]\nname = \"h\"\n[control]\n{control}\n");
        config::parse("f", &text)
            .err()
            .map(|error| error.to_string().lines().map(String::from).collect())
            .unwrap_or_default()
    }

    #[test]
    fn clear_text_stays_on_the_host() {
        const TLS: &str = "tls_cert = \"/c\"\ntls_key = \"/k\"\n";
        const CA: &str = "tls_client_ca = \"/a\"\n";
        for good in [
            "http = \"127.0.0.1:9080\"\nconsole = \"[::1]:9001\"".into(),
            "http = \"127.0.0.1:0\"\nconsole = \"127.0.0.1:0\"".into(),
            format!("http = \"0.0.0.0:9080\"\n{TLS}"),
            format!("http = \"[fd00::1]:9080\"\ntoken_file = \"/t\"\n{TLS}"),
            format!("console = \"192.0.2.1:9001\"\n{TLS}{CA}"),
        ] {
            assert_eq!(errors(&good), Vec::<String>::new(), "{good}");
        }
        for (bad, words) in [
            ("http = \"192.0.2.1:9080\"".into(), "tls_cert and tls_key"),
            ("http = \"[::]:9080\"".into(), "clear text"),
            ("http = \"localhost:9080\"".into(), "not an address"),
            ("console = \"0.0.0.0:9001\"".into(), "tls_client_ca"),
            (format!("console = \"0.0.0.0:9001\"\n{TLS}"), "tls_client_ca"),
            ("console = \"127.0.0.1:1\"\nhttp = \"127.0.0.1:1\"".into(), "another port"),
            ("tls_cert = \"/c\"".into(), "belong together"),
            ("tls_key = \"/c\"".into(), "belong together"),
            (CA.into(), "asks for TLS"),
            ("token_file = \"t\"".into(), "absolute"),
        ] {
            let told = errors(&bad);
            assert_eq!(told.len(), 1, "{bad}: {told:?}");
            assert!(told[0].starts_with("f:") && told[0].contains(words), "{bad}: {told:?}");
        }
    }

    #[test]
    fn access_takes_a_restart() {
        let at = |control: &str| {
            config::parse("f", &format!("host.name = \"h\"\n[control]\n{control}")).unwrap().desired
        };
        let (none, some) = (at(""), at("http = \"127.0.0.1:9080\""));
        let problems = crate::plan::restart_needed(&none, &some);
        assert_eq!(problems.len(), 1);
        assert!(problems[0].to_string().contains("http"), "{}", problems[0]);
    }
}
